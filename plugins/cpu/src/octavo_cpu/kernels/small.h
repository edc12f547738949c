// The small functions of a step on one instruction set.
#pragma once
#include "embedding.h"
#include "filters.h"
#include "gate.h"
#include "isa.h"
#include "norm.h"
#include "rope.h"
#include "sampling.h"

namespace {

constexpr octavo::SmallOps SMALL_OPS{norm_rows,    add_numbers,   qkv_tokens,    gate_rows, embed_tokens,
                                     finish_logits, choose_tokens, keep_top, keep_likely};

}  // namespace
