// act(gate) * up for products that do not apply their gate themselves.
#pragma once
#include "rows.h"

namespace {

void gate_rows(const void* context, int64_t begin, int64_t end) {
  const auto& a = *static_cast<const octavo::GateArgs*>(context);
  with_type(a.dtype, [&]([[maybe_unused]] auto* type) {
    using T = std::decay_t<decltype(*type)>;
    for (int64_t r = begin; r < end; ++r) {
      const T* x = static_cast<const T*>(a.x) + r * 2 * a.width;
      T* out = static_cast<T*>(a.out) + r * a.width;
      for (int64_t i = 0; i < a.width; i += 16) {
        const F act = as_stored<T>(activate(a.gate, get(x + i, a.width - i)));
        put(out + i, Simd::mul(act, get(x + a.width + i, a.width - i)), a.width - i);
      }
    }
  });
}

}  // namespace
