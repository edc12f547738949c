// What a piece of a vocabulary has to offer.
#pragma once
#include "api.h"

namespace octavo {

constexpr int64_t CHUNK_TOKENS = 16384;

struct Choice {
  float score, largest;  // of the token, with its noise if there is any; of the logits
  int64_t token;
  bool sound;  // no NaN and no plus infinity among the logits
};

struct ChoiceJob {
  const SampleArgs* args;
  Choice* choices;  // [rows, chunks]
  int64_t chunks;
};

}  // namespace octavo
