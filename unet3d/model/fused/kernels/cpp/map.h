// A feature map in memory, rounding to its elements, and a parallel loop over its lines.
#pragma once

#include "simd.h"

using T = ELEMENT;

inline void narrow(float v, float* to) { *to = v; }
inline void narrow(float v, Bf16* to) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &v, sizeof(bits));
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    to->bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}
#ifdef __FLT16_MAX__
inline void narrow(float v, _Float16* to) { *to = _Float16(v); }
#endif

// (B, C, D, H, W), channels-last; the strides are those of B, D, H, W.
struct Map {
    T* data;
    int64_t batch, channels, depth, height, width, stride[4];

    int64_t lines() const { return depth * height; }
    T* line(int64_t b, int64_t n) const {
        return data + b * stride[0] + n / height * stride[1] + n % height * stride[2];
    }
};

// Calls body(b, first, last, thread) on the lines of each volume, split among threads.
template <class Body> static void by_lines(const Map& map, int threads, Body body) {
#pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1)
    for (int64_t b = 0; b < map.batch; b++)
        for (int t = 0; t < threads; t++)
            body(b, map.lines() * t / threads, map.lines() * (t + 1) / threads, t);
}
