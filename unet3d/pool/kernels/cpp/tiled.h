// Windows of 2x2x2, 1x2x2 or 2x2x1 that tile the volume: forward and backward read memory once.
#pragma once

#include "grid.h"
#include "simd.h"

template <class V> inline void sort4(V* v) {
    order(v[0], v[1]);
    order(v[2], v[3]);
    order(v[0], v[2]);
    order(v[1], v[3]);
    order(v[1], v[2]);
}

// The two middle values of K = 4 or 8, the lower first.
template <int K, int L> inline void find_middle(const F<L>* x, F<L>& low, F<L>& high) {
    F<L> a[K];
    for (int k = 0; k < K; k++) a[k] = x[k];
    sort4(a);
    if constexpr (K == 4) {
        low = a[1];
        high = a[2];
    } else {
        F<L>* b = a + 4;
        sort4(b);
        low = greater(greater(a[0], b[0]), lesser(a[2], b[2]));
        high = lesser(lesser(a[3], b[3]), greater(a[1], b[1]));
        order(low, high);
    }
}

// The mask of those two elements; of equal ones the lower index comes first, as in a stable sort.
template <int K, int L>
inline I<L> select_middle(const F<L>* x, F<L> low, F<L> high, I<L> nan) {
    I<L> rank{}, mask{}, upper{};
    for (int k = 0; k < K; k++) rank -= x[k] < low;
    for (int k = 0; k < K; k++) {
        const I<L> equal = x[k] == low;
        mask |= equal & ((rank == K / 2 - 1) | (rank == K / 2)) & (1 << k);
        rank -= equal;
    }
    for (int k = K - 1; k >= 0; k--) upper = x[k] == high ? I<L>{} + (1 << k) : upper;
    mask |= (low < high) & upper;
    return nan ? I<L>{} + 3 : mask;
}

template <int K, int L> inline I<L> any_nan(const F<L>* x) {
    I<L> nan{};
    for (int k = 0; k < K; k++) nan |= x[k] != x[k];
    return nan;
}

template <class T, int KD, int KH, int KW> struct Tiled {
    static constexpr int K = KD * KH * KW;
    const Grid& g;
    const Pool pool;
    const float tau;
    const int threads;

    explicit Tiled(const Job& job)
        : g(job.grid), pool(Pool(job.pool)), tau(float(job.tau)), threads(int(job.threads)) {}

    void forward(const T* x, T* y, uint8_t* code) const {
        by_lanes([&](auto lanes) { forward_all<decltype(lanes)::value>(x, y, code); });
    }
    void backward(const T* grad, const uint8_t* code, const T* x, T* to) const {
        by_lanes([&](auto lanes) { backward_all<decltype(lanes)::value>(grad, code, x, to); });
    }

  private:
    template <int N> struct Lanes {
        static constexpr int value = N;
    };
    int64_t run_length() const { return g.inner == 1 ? g.out[2] : g.inner; }  // of contiguous outputs

    template <class Body> void by_lanes(Body body) const {
        const int64_t n = run_length();
        if (n >= 16) body(Lanes<16>());
        else if (n >= 8) body(Lanes<8>());
        else if (n >= 4) body(Lanes<4>());
        else body(Lanes<1>());
    }

    // Calls body(first output, first input) for blocks of L windows, as offsets into the row. The last
    // block overlaps the one before it, so that none is partial.
    template <int L, class Body> void blocks(Body body) const {
        const int64_t n = run_length(), runs = g.row() / n;
        for (int64_t w = 0; w < runs; w++)
            for (int64_t j = 0; j < n; j += L) {
                const int64_t c = j + L <= n ? j : n - L;
                body(w * n + c, g.inner == 1 ? c * KW : w * KW * n + c);
            }
    }
    int64_t offset(int k) const {  // offset of a window's k-th element from its first
        return ((k / (KH * KW) * g.in[1] + k / KW % KH) * g.in[2] + k % KW) * g.inner;
    }
    template <int L> void load(const T* x, F<L>* v) const {
        for (int k = 0; k < K; k += KW)
            if (KW == 2 && g.inner == 1)
                Elements<T, L>::load_pair(x + offset(k), v[k], v[k + KW - 1]);
            else
                for (int w = k; w < k + KW; w++) v[w] = Elements<T, L>::load(x + offset(w));
    }
    template <int L> void store(T* x, const F<L>* v) const {
        for (int k = 0; k < K; k += KW)
            if (KW == 2 && g.inner == 1)
                Elements<T, L>::store_pair(x + offset(k), v[k], v[k + KW - 1]);
            else
                for (int w = k; w < k + KW; w++) Elements<T, L>::store(x + offset(w), v[w]);
    }

    template <int L> F<L> pool_windows(const F<L>* v, uint8_t* code) const {
        if (pool == AVG) {
            F<L> sum = v[0];
            for (int k = 1; k < K; k++) sum += v[k];
            return sum / float(K);
        }
        if (pool == MAX) {
            F<L> best = v[0];
            I<L> bit = I<L>{} + 1;
            for (int k = 1; k < K; k++) {
                const I<L> wins = (v[k] > best) | (v[k] != v[k]);
                best = wins ? v[k] : best;
                bit = wins ? I<L>{} + (1 << k) : bit;
            }
            store_bytes<L>(code, bit);
            return best;
        }
        const I<L> nan = any_nan<K, L>(v);
        F<L> low, high;
        find_middle<K, L>(v, low, high);
        if (pool == MEDIAN) {
            store_bytes<L>(code, select_middle<K, L>(v, low, high, nan));
        } else {
            const I<L> all = I<L>{} - 1;
            Soft<L> a(low, tau), b(high, tau);
            for (int k = 0; k < K; k++) a.add(v[k], all), b.add(v[k], all);
            low = a.mean();
            high = b.mean();
        }
        return nan ? F<L>{} + NOT_A_NUMBER : low * 0.5f + high * 0.5f;
    }

    template <int L> void soft_gradients(const F<L>* v, F<L> grad, F<L>* out) const {
        const I<L> all = I<L>{} - 1, nan = any_nan<K, L>(v);
        F<L> low, high, by_low{}, by_high{};
        find_middle<K, L>(v, low, high);
        const I<L> mask = select_middle<K, L>(v, low, high, nan);
        Soft<L> a(low, tau), b(high, tau);
        for (int k = 0; k < K; k++) a.add(v[k], all), b.add(v[k], all);
        for (int k = 0; k < K; k++)
            out[k] = a.derivative(v[k], all, by_low) + b.derivative(v[k], all, by_high);
        for (int k = 0; k < K; k++) {
            const F<L> through = v[k] == low ? by_low : by_high;
            out[k] += (mask & (1 << k)) != 0 ? through : F<L>{};
            out[k] = (nan ? F<L>{} + NOT_A_NUMBER : out[k]) * 0.5f * grad;
        }
    }

    template <int L> void forward_all(const T* x, T* y, uint8_t* code) const {
        const int64_t rows = g.outer * g.out[0] * g.out[1];
#pragma omp parallel for num_threads(threads)
        for (int64_t r = 0; r < rows; r++) {
            const int64_t h = r % g.out[1], d = r / g.out[1] % g.out[0], o = r / g.out[1] / g.out[0];
            const T* row = x + g.input_row(o, d * KD, h * KH);
            const int64_t at = r * g.row();
            blocks<L>([&](int64_t output, int64_t input) {
                F<L> v[K];
                load<L>(row + input, v);
                Elements<T, L>::store(y + at + output, pool_windows<L>(v, code + at + output));
            });
        }
    }

    template <int L>
    void backward_all(const T* grad, const uint8_t* code, const T* x, T* to) const {
        const float part = pool == MEDIAN ? 0.5f : pool == AVG ? 1.0f / K : 1.0f;
        const int64_t depth = (g.in[0] + KD - 1) / KD, height = (g.in[1] + KH - 1) / KH;
        const int64_t line = g.in[2] * g.inner;
#pragma omp parallel for num_threads(threads)
        for (int64_t r = 0; r < g.outer * depth * height; r++) {
            const int64_t h = r % height, d = r / height % depth, o = r / height / depth;
            const bool full = d < g.out[0] && h < g.out[1];
            const int64_t covered = full ? g.row() * KW : 0;  // the rest is in no window: zero
            for (int64_t z = d * KD; z < (d + 1) * KD && z < g.in[0]; z++)
                for (int64_t y = h * KH; y < (h + 1) * KH && y < g.in[1]; y++)
                    std::memset(
                        (void*)(to + g.input_row(o, z, y) + covered), 0, (line - covered) * sizeof(T)
                    );
            if (!full) continue;
            const int64_t from = ((o * g.out[0] + d) * g.out[1] + h) * g.row();
            const int64_t row = g.input_row(o, d * KD, h * KH);
            blocks<L>([&](int64_t output, int64_t input) {
                const F<L> upper = Elements<T, L>::load(grad + from + output), share = upper * part;
                F<L> out[K];
                if (pool == APPROX) {
                    F<L> v[K];
                    load<L>(x + row + input, v);
                    soft_gradients<L>(v, upper, out);
                } else {
                    const I<L> mask = pool == AVG ? I<L>{} - 1 : load_bytes<L>(code + from + output);
                    for (int k = 0; k < K; k++) out[k] = (mask & (1 << k)) != 0 ? share : F<L>{};
                }
                store<L>(to + row + input, out);
            });
        }
    }
};
