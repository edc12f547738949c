// A recorded step, run again: the calls of its functions in order, with the arguments they had.
#include "api.h"

void octavo_replay(const octavo::ReplayArgs* args) {
  for (int64_t i = 0; i < args->num_calls; ++i) args->functions[i](args->args + args->offsets[i]);
}
