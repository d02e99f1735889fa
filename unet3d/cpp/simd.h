// Building blocks of the kernels: L floats in a register, loads and stores, order, exp.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

template <int L> struct Simd {
    typedef float F __attribute__((vector_size(4 * L)));
    typedef int32_t I __attribute__((vector_size(4 * L)));
    typedef uint32_t U __attribute__((vector_size(4 * L)));
    typedef int64_t Wide __attribute__((vector_size(8 * L)));
    typedef uint16_t U16 __attribute__((vector_size(2 * L)));
    typedef uint8_t U8 __attribute__((vector_size(L)));
};
template <int L> using F = typename Simd<L>::F;
template <int L> using I = typename Simd<L>::I;  // as a boolean: -1 or 0
template <int L> using Wide = typename Simd<L>::Wide;

constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

template <class V> inline V read(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof(V));
    return v;
}
template <class V> inline void write(void* to, V v) { std::memcpy(to, &v, sizeof(V)); }

// C++17 has no bfloat16 type: store its bits, compute in float.
struct Bf16 {
    uint16_t bits;
};
inline float widen(float v) { return v; }
inline float widen(Bf16 v) {
    const uint32_t bits = uint32_t(v.bits) << 16;
    return read<float>(&bits);
}
#ifdef __FLT16_MAX__
inline float widen(_Float16 v) { return float(v); }
#endif

// Converts L elements in memory to floats and back; a pair is 2 L elements, even and odd ones.
template <class T, int L> struct Elements {
    using U = typename Simd<L>::U;
    using U16 = typename Simd<L>::U16;
    typedef T V __attribute__((vector_size(sizeof(T) * L)));
    static F<L> load(const T* from) { return __builtin_convertvector(read<V>(from), F<L>); }
    static void store(T* to, F<L> v) { write(to, __builtin_convertvector(v, V)); }
    static void load_pair(const T* from, F<L>& even, F<L>& odd) {
        if constexpr (sizeof(T) == 2) {
            const U both = read<U>(from);
            even = __builtin_convertvector((V)__builtin_convertvector(both, U16), F<L>);
            odd = __builtin_convertvector((V)__builtin_convertvector(both >> 16, U16), F<L>);
        } else {
            part(read<V>(from), read<V>(from + L), even, odd, std::make_integer_sequence<int, L>());
        }
    }
    static void store_pair(T* to, F<L> even, F<L> odd) {
        if constexpr (sizeof(T) == 2) {
            const V a = __builtin_convertvector(even, V), b = __builtin_convertvector(odd, V);
            write(to, __builtin_convertvector((U16)a, U) | __builtin_convertvector((U16)b, U) << 16);
        } else {
            V low, high;
            weave(even, odd, low, high, std::make_integer_sequence<int, L>());
            write(to, low);
            write(to + L, high);
        }
    }

  private:
    template <int... l>
    static void part(V a, V b, V& even, V& odd, std::integer_sequence<int, l...>) {
        even = __builtin_shufflevector(a, b, 2 * l...);
        odd = __builtin_shufflevector(a, b, 2 * l + 1 ...);
    }
    template <int... l>
    static void weave(V even, V odd, V& low, V& high, std::integer_sequence<int, l...>) {
        low = __builtin_shufflevector(even, odd, l / 2 + l % 2 * L...);
        high = __builtin_shufflevector(even, odd, (l + L) / 2 + (l + L) % 2 * L...);
    }
};
template <int L> struct Elements<Bf16, L> {
    using U = typename Simd<L>::U;
    using U16 = typename Simd<L>::U16;
    static U bits(F<L> v) {  // rounded to nearest, ties to even, in the upper half of each word
        const U u = (U)v;
        return v != v ? U{} + 0x7fc00000u : (u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u;
    }
    static F<L> load(const Bf16* from) {
        return (F<L>)(__builtin_convertvector(read<U16>(from), U) << 16);
    }
    static void store(Bf16* to, F<L> v) {
        write(to, __builtin_convertvector(bits(v) >> 16, U16));
    }
    static void load_pair(const Bf16* from, F<L>& even, F<L>& odd) {
        const U both = read<U>(from);
        even = (F<L>)(both << 16);
        odd = (F<L>)(both & 0xffff0000u);
    }
    static void store_pair(Bf16* to, F<L> even, F<L> odd) { write(to, bits(even) >> 16 | bits(odd)); }
};
template <int L> inline void store_bytes(uint8_t* to, I<L> v) {
    write(to, __builtin_convertvector(v, typename Simd<L>::U8));
}
template <int L> inline I<L> load_bytes(const uint8_t* from) {
    return __builtin_convertvector(read<typename Simd<L>::U8>(from), I<L>);
}
template <class T> inline T narrow(float v) {
    T t;
    Elements<T, 1>::store(&t, F<1>{v});
    return t;
}

template <class V> inline V lesser(V a, V b) { return a < b ? a : b; }
template <class V> inline V greater(V a, V b) { return a < b ? b : a; }
template <class V> inline void order(V& a, V& b) {
    const V low = lesser(a, b);
    b = greater(a, b);
    a = low;
}

// exp(t) for t <= 0 with an error below 2e-7; 0 below the normal range of float.
template <int L> inline F<L> exponential(F<L> t) {
    const I<L> vanishes = ~(t > -87.0f);
    t = vanishes ? F<L>{} : t;
    const I<L> n = __builtin_convertvector(t * 1.44269504f - 0.5f, I<L>);
    const F<L> whole = __builtin_convertvector(n, F<L>);
    const F<L> r = (t - whole * 0.693359375f) + whole * 2.12194440e-4f;  // ln 2 in two parts
    F<L> p = F<L>{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return vanishes ? F<L>{} : (F<L>)((I<L>)p + (n << 23));
}

// A soft mean around a middle value. Elements of weight 0 are skipped, so that a distant infinity does
// not give NaN; `present` is 0 outside the volume.
template <int L> struct Soft {
    F<L> center, scale, total{}, offset{};
    Soft(F<L> center, float tau) : center(center), scale(F<L>{} - 1 / tau) {}
    F<L> difference(F<L> x) const { return x == center ? F<L>{} : x - center; }
    F<L> weight(F<L> x, I<L> present) const {
        const F<L> d = difference(x);
        return present ? exponential<L>((d < 0 ? -d : d) * scale) : F<L>{};
    }
    void add(F<L> x, I<L> present) {
        const F<L> w = weight(x, present);
        total += w;
        offset += w > 0 ? w * difference(x) : F<L>{};
    }
    F<L> mean() const { return center + offset / total; }
    // The derivative of mean() by x; the part through the center is added to `through`.
    F<L> derivative(F<L> x, I<L> present, F<L>& through) const {
        const F<L> w = weight(x, present) / total, d = difference(x);
        const F<L> pull = w * (d - offset / total) * (d < 0 ? scale : -scale);
        const F<L> moved = (w > 0) & (d != 0) ? pull : F<L>{};
        through += moved;
        return w - moved;
    }
};
