// Draws one token from a row of logits: temperature, top-k, top-p, min-p and the inverse transform.
#pragma once

#include <cstdint>

namespace pagemill {

struct TokenDraw {
  float temperature;  // above zero
  int64_t top_k;      // 0: all
  double top_p;       // 1: all
  float min_p;        // 0: all
  double uniform;     // in [0, 1)
};

// x: [n] logits without NaN and +inf, at least one of them finite; maximum: the largest. Scratch memory is per thread
// and kept.
int64_t draw_token(const float* x, int64_t n, float maximum, const TokenDraw& draw);

}  // namespace pagemill
