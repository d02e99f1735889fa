// Conversion between elements in memory and floats in registers.
#pragma once

#include <cstdint>
#include <cstring>

struct Bf16 {
    uint16_t bits;
};

inline float widen(float v) { return v; }
inline float widen(Bf16 v) {
    const uint32_t bits = uint32_t(v.bits) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof(out));
    return out;
}
inline void narrow(float v, float* to) { *to = v; }
inline void narrow(float v, Bf16* to) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &v, sizeof(bits));
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    to->bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}
#ifdef __FLT16_MAX__
inline float widen(_Float16 v) { return float(v); }
inline void narrow(float v, _Float16* to) { *to = _Float16(v); }
#endif
