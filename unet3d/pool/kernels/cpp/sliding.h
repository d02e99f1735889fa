// Windows of any size, stride and padding, LANES at a time, with a median network as argument.
#pragma once

#include <cmath>
#include <vector>

#include "grid.h"
#include "simd.h"

constexpr int LANES = 8;

// The part of a window inside the volume, per axis, and the indices of its elements.
struct Box {
    int64_t first[3], count[3];

    Box(const Grid& g, const int64_t (&at)[3]) {
        for (int a = 0; a < 3; a++) {
            const int64_t start = at[a] * g.stride[a] - g.padding[a];
            const int64_t stop = start + g.size[a] < g.in[a] ? start + g.size[a] : g.in[a];
            first[a] = start < 0 ? -start : 0;
            count[a] = stop - start - first[a];
        }
    }
    int64_t elements() const { return count[0] * count[1] * count[2]; }
    // An index counts all K elements in order (D, H, W), a local one only those inside.
    int to_local(const Grid& g, int index) const {
        const int64_t d = index / (g.size[1] * g.size[2]), h = index / g.size[2] % g.size[1];
        const int64_t w = index % g.size[2];
        return int(((d - first[0]) * count[1] + h - first[1]) * count[2] + w - first[2]);
    }
    int to_global(const Grid& g, int local) const {
        const int64_t d = local / (count[1] * count[2]), h = local / count[2] % count[1];
        const int64_t w = local % count[2];
        return int(((d + first[0]) * g.size[1] + h + first[1]) * g.size[2] + w + first[2]);
    }
};

template <class T> struct Sliding {
    const Job& job;
    const Grid& g;
    const Pool pool;
    const Code kind;
    const int K, threads;
    const float tau;

    explicit Sliding(const Job& job)
        : job(job), g(job.grid), pool(Pool(job.pool)), kind(Code(job.code)), K(int(g.elements())),
          threads(int(job.threads)), tau(float(job.tau)) {}

    void forward(const T* x, T* y, uint8_t* code) const {
        const int64_t rows = g.outer * g.out[0] * g.out[1];
#pragma omp parallel for num_threads(threads)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < g.row(); j += LANES) {
                const int n = int(g.row() - j < LANES ? g.row() - j : LANES);
                Block b(*this, x, r, j);
                const F<LANES> result = b.pool();
                for (int l = 0; l < n; l++) {
                    const int64_t at = r * g.row() + j + l;
                    y[at] = narrow<T>(result[l]);
                    if (kind != NONE) b.record(code + at, l);
                }
            }
    }

    // Each task owns one plane of the input, so that no two threads add to an element.
    void backward(const T* grad, const uint8_t* code, const T* x, T* to) const {
        const int64_t plane = g.in[1] * g.in[2] * g.inner;
#pragma omp parallel num_threads(threads)
        {
            std::vector<float> sum(plane);
#pragma omp for
            for (int64_t p = 0; p < g.outer * g.in[0]; p++) {
                const int64_t o = p / g.in[0], z = p % g.in[0];
                std::fill(sum.begin(), sum.end(), 0.0f);
                for (int64_t d = 0; d < g.out[0]; d++) {
                    const int64_t dz = z - (d * g.stride[0] - g.padding[0]);
                    if (dz < 0 || dz >= g.size[0]) continue;
                    for (int64_t h = 0; h < g.out[1]; h++) {
                        const int64_t r = (o * g.out[0] + d) * g.out[1] + h;
                        if (pool == APPROX) scatter_soft(grad, x, r, dz, sum.data());
                        else scatter(grad, code, r, dz, sum.data());
                    }
                }
                for (int64_t i = 0; i < plane; i++) to[p * plane + i] = narrow<T>(sum[i]);
            }
        }
    }

  private:
    int64_t base(int64_t h, int64_t w, int64_t c) const {  // offset of a window's first element in its plane
        const int64_t y = h * g.stride[1] - g.padding[1], x = w * g.stride[2] - g.padding[2];
        return (y * g.in[2] + x) * g.inner + c;
    }
    int64_t in_plane(int index) const {
        const int64_t h = index / g.size[2] % g.size[1], w = index % g.size[2];
        return (h * g.in[2] + w) * g.inner;
    }

    // LANES windows of one row: their elements, and which are inside the volume.
    struct Block {
        const Sliding& s;
        const Grid& g;
        int64_t d, h, w[LANES];
        F<LANES> v[MOST];
        I<LANES> present[MOST], count{}, low{}, high{}, nan{};
        F<LANES> low_value{}, high_value{};

        Block(const Sliding& s, const T* x, int64_t r, int64_t j) : s(s), g(s.g) {
            h = r % g.out[1];
            d = r / g.out[1] % g.out[0];
            int64_t start[LANES];
            const int64_t o = r / g.out[1] / g.out[0], last = g.row() - 1;
            for (int l = 0; l < LANES; l++) {
                const int64_t at = j + l < last ? j + l : last;  // idle lanes repeat the last window
                w[l] = at / g.inner;
                start[l] = (w[l] * g.stride[2] - g.padding[2]) * g.inner + at % g.inner;
            }
            const int64_t width = g.in[2] * g.inner;
            int k = 0;
            for (int64_t dz = 0; dz < g.size[0]; dz++)
                for (int64_t dy = 0; dy < g.size[1]; dy++) {
                    const int64_t z = d * g.stride[0] - g.padding[0] + dz;
                    const int64_t y = h * g.stride[1] - g.padding[1] + dy;
                    const bool inside = z >= 0 && z < g.in[0] && y >= 0 && y < g.in[1];
                    const T* row = x + (inside ? g.input_row(o, z, y) : 0);
                    for (int64_t dx = 0; dx < g.size[2]; dx++, k++)
                        for (int l = 0; l < LANES; l++) {
                            const int64_t at = start[l] + dx * g.inner;
                            const bool valid = inside && at >= 0 && at < width;
                            v[k][l] = valid ? widen(row[at]) : 0.0f;
                            present[k][l] = -int(valid);
                        }
                }
            for (int i = 0; i < s.K; i++) {
                count -= present[i];
                nan |= v[i] != v[i];
            }
        }

        F<LANES> pool() {
            if (s.pool == AVG) {
                F<LANES> sum{};
                for (int k = 0; k < s.K; k++) sum += v[k];
                return sum / float(s.K);
            }
            if (s.pool == MAX) {
                F<LANES> best{};
                low -= 1;
                for (int k = 0; k < s.K; k++) {
                    const I<LANES> wins = present[k] & ((low < 0) | (v[k] > best) | (v[k] != v[k]));
                    best = wins ? v[k] : best;
                    low = wins ? I<LANES>{} + k : low;
                }
                high = low;
                return best;
            }
            find_middle();
            F<LANES> a = low_value, b = high_value;
            if (s.pool == APPROX) {
                a = soft(low_value).mean();
                b = soft(high_value).mean();
            }
            return nan ? F<LANES>{} + NOT_A_NUMBER : a * 0.5f + b * 0.5f;
        }

        // A key orders by value, then index. Absent elements sort alternately below and above all others,
        // so that the middle of the present elements stays in the middle of the K.
        void find_middle() {
            Wide<LANES> key[MOST];
            I<LANES> absent{};
            for (int k = 0; k < s.K; k++) {
                const I<LANES> bits = (I<LANES>)(v[k] + 0.0f);  // -0.0 becomes 0.0
                const I<LANES> ordered = bits ^ ((bits >> 31) & 0x7fffffff);
                const I<LANES> far = (absent & 1) != 0 ? I<LANES>{} + 0x7fffffff : I<LANES>{} + INT32_MIN;
                absent -= ~present[k];
                const I<LANES> order = present[k] ? ordered : far;
                key[k] = __builtin_convertvector(order, Wide<LANES>) << 16 | int64_t(k);
            }
            for (int64_t c = 0; c < s.job.comparators; c++) {
                const int32_t* pair = s.job.network + 3 * c;  // two wires; 1: minimum, 2: maximum
                const Wide<LANES> a = key[pair[0]], b = key[pair[1]];
                if (pair[2] & 1) key[pair[0]] = lesser(a, b);
                if (pair[2] & 2) key[pair[1]] = greater(a, b);
            }
            const int m = (s.K - 1) / 2;
            for (int l = 0; l < LANES; l++) {
                const bool odd = count[l] % 2;
                low[l] = int(key[odd && s.K % 2 == 0 ? m + 1 : m][l] & 0xffff);
                high[l] = int(key[odd && s.K % 2 ? m : m + 1][l] & 0xffff);
                if (nan[l]) {  // no order: the first elements inside are selected
                    const Box box = this->box(l);
                    low[l] = box.to_global(g, 0);
                    high[l] = box.to_global(g, odd ? 0 : 1);
                }
                low_value[l] = v[low[l]][l];
                high_value[l] = v[high[l]][l];
            }
        }

        Soft<LANES> soft(F<LANES> center) const {
            Soft<LANES> result(center, s.tau);
            for (int k = 0; k < s.K; k++) result.add(v[k], present[k]);
            return result;
        }

        Box box(int l) const { return Box(g, {d, h, w[l]}); }

        void record(uint8_t* code, int l) const {
            if (s.kind == MASK) {
                *code = uint8_t(1 << low[l] | 1 << high[l]);
            } else if (s.kind == INDEX) {
                *code = uint8_t(low[l]);
            } else if (s.kind == TWO) {
                code[0] = uint8_t(low[l]);
                code[g.outputs()] = uint8_t(high[l]);
            } else {
                const Box box = this->box(l);
                const int a = box.to_local(g, low[l]), b = box.to_local(g, high[l]);
                const int small = a < b ? a : b, large = a < b ? b : a;
                *code = uint8_t(box.elements() % 2 ? a : large * (large - 1) / 2 + small);
            }
        }
    };

    // Decodes the two selected indices; they are equal where one element is selected.
    void decode(const uint8_t* code, const int64_t (&at)[3], int& low, int& high) const {
        low = high = *code;
        if (kind == MASK) {
            low = __builtin_ctz(*code);
            high = 31 - __builtin_clz(*code);
        } else if (kind == TWO) {
            high = code[g.outputs()];
        } else if (kind == PAIR) {
            const Box box(g, at);
            if (box.elements() % 2 == 0) {
                high = int((1 + std::sqrt(1.0f + 8 * *code)) / 2);
                low = *code - high * (high - 1) / 2;
            }
            low = box.to_global(g, low);
            high = box.to_global(g, high);
        }
    }

    void scatter(const T* grad, const uint8_t* code, int64_t r, int64_t dz, float* sum) const {
        const int64_t h = r % g.out[1], d = r / g.out[1] % g.out[0];
        const int64_t plane = g.size[1] * g.size[2];
        for (int64_t w = 0, at = r * g.row(); w < g.out[2]; w++)
            for (int64_t c = 0; c < g.inner; c++, at++) {
                const int64_t first = base(h, w, c);
                if (pool == AVG) {
                    const Box box(g, {d, h, w});
                    const float share = widen(grad[at]) / float(K);
                    for (int64_t y = box.first[1]; y < box.first[1] + box.count[1]; y++)
                        for (int64_t x = box.first[2]; x < box.first[2] + box.count[2]; x++)
                            sum[first + (y * g.in[2] + x) * g.inner] += share;
                    continue;
                }
                int low, high;
                decode(code + at, {d, h, w}, low, high);
                const float half = widen(grad[at]) * 0.5f;
                if (low == high) {
                    if (low / plane == dz) sum[first + in_plane(low)] += widen(grad[at]);
                    continue;
                }
                if (low / plane == dz) sum[first + in_plane(low)] += half;
                if (high / plane == dz) sum[first + in_plane(high)] += half;
            }
    }

    void scatter_soft(const T* grad, const T* x, int64_t r, int64_t dz, float* sum) const {
        const int64_t plane = g.size[1] * g.size[2];
        for (int64_t j = 0; j < g.row(); j += LANES) {
            Block b(*this, x, r, j);
            b.find_middle();
            const Soft<LANES> low = b.soft(b.low_value), high = b.soft(b.high_value);
            F<LANES> out[MOST], by_low{}, by_high{};
            for (int k = 0; k < K; k++)
                out[k] = low.derivative(b.v[k], b.present[k], by_low)
                       + high.derivative(b.v[k], b.present[k], by_high);
            for (int k = int(dz * plane); k < int((dz + 1) * plane); k++) {
                out[k] += b.low == k ? by_low : F<LANES>{};
                out[k] += b.high == k ? by_high : F<LANES>{};
                out[k] = b.nan ? F<LANES>{} + NOT_A_NUMBER : out[k];
                for (int l = 0; l < LANES && j + l < g.row(); l++)
                    if (b.present[k][l])
                        sum[base(b.h, b.w[l], (j + l) % g.inner) + in_plane(k)]
                            += out[k][l] * 0.5f * widen(grad[r * g.row() + j + l]);
            }
        }
    }
};
