// Norm, activation and upsampling of channels-last maps, or of some rows or channels of one.

#include <algorithm>
#include <vector>

#include "interpolate.h"
#include "map.h"

constexpr int64_t BLOCK = 64;  // voxels summed in float before the sum is added to a double

// Per-voxel functions over the channels. An output may alias an input of the same element.
using Numbers = const float* __restrict;

// Factors of an activation below and above 0. If GCC knew that the second is 1, it would branch
// around the multiplication, and not vectorize the loop.
struct Slope {
    float below, above;
    explicit Slope(float slope) : below(slope), above(one()) {}
    static float one() {
        volatile float value = 1;
        return value;
    }
};

static inline void normalize_voxel(
    const T* y, T* out, Numbers scale, Numbers shift, Slope slope, int64_t channels
) {
#pragma omp simd
    for (int64_t c = 0; c < channels; c++) {
        const float n = scale[c] * widen(y[c]) + shift[c];
        narrow(n * (n < 0 ? slope.below : slope.above), out + c);
    }
}

static inline void add_normalized_voxel(
    const T* y, T* out, Numbers scale, Numbers shift, Slope slope, int64_t channels
) {
#pragma omp simd
    for (int64_t c = 0; c < channels; c++) {
        const float n = scale[c] * widen(y[c]) + shift[c] + widen(out[c]);
        narrow(n * (n < 0 ? slope.below : slope.above), out + c);
    }
}

static inline void add_moments(
    const T* y, Numbers pivot, float* __restrict first, float* __restrict second, int64_t channels
) {
#pragma omp simd
    for (int64_t c = 0; c < channels; c++) {
        const float d = widen(y[c]) - pivot[c];
        first[c] += d;
        second[c] += d * d;
    }
}

static inline void add_gradient_sums(
    const T* g, const T* y, Numbers scale, Numbers shift, Numbers mean, Numbers inverse,
    Slope slope, float* __restrict first, float* __restrict second, int64_t channels
) {
#pragma omp simd
    for (int64_t c = 0; c < channels; c++) {
        const float x = widen(y[c]);
        const float m = widen(g[c]) * (scale[c] * x + shift[c] > 0 ? slope.above : slope.below);
        first[c] += m;
        second[c] += m * ((x - mean[c]) * inverse[c]);
    }
}

static inline void gradient_voxel(
    const T* g, const T* y, T* out, Numbers scale, Numbers shift, Numbers constant, Numbers linear,
    Slope slope, int64_t channels
) {
#pragma omp simd
    for (int64_t c = 0; c < channels; c++) {
        const float x = widen(y[c]);
        const float m = widen(g[c]) * (scale[c] * x + shift[c] > 0 ? slope.above : slope.below);
        narrow(scale[c] * m + constant[c] + linear[c] * x, out + c);
    }
}

// Calls voxel(from, to, b) for every voxel of y and its place in out.
template <class Voxel>
static void by_voxels(const Map& y, const Map& out, int threads, Voxel voxel) {
    by_lines(y, threads, [&](int64_t b, int64_t first, int64_t last, int) {
        for (int64_t n = first; n < last; n++) {
            const T* from = y.line(b, n);
            T* to = out.line(b, n);
            for (int64_t w = 0; w < y.width; w++, from += y.stride[3], to += out.stride[3])
                voxel(from, to, b);
        }
    });
}

extern "C" void normalize(
    const Map* y, const Map* out, const float* scale, const float* shift, float slope, int threads
) {
    const int64_t channels = y->channels;
    by_voxels(*y, *out, threads, [=, slope = Slope(slope)](const T* from, T* to, int64_t b) {
        normalize_voxel(from, to, scale + b * channels, shift + b * channels, slope, channels);
    });
}

extern "C" void add_normalized(
    const Map* y, const Map* out, const float* scale, const float* shift, float slope, int threads
) {
    const int64_t channels = y->channels;
    by_voxels(*y, *out, threads, [=, slope = Slope(slope)](const T* from, T* to, int64_t b) {
        add_normalized_voxel(from, to, scale + b * channels, shift + b * channels, slope, channels);
    });
}

// Two sums per volume and channel: `add` adds a voxel to two float accumulators per channel, which
// are added to doubles every BLOCK voxels.
template <class Add>
static std::vector<double> two_sums(const Map& map, int threads, Add add) {
    const int64_t channels = map.channels;
    std::vector<double> sums(map.batch * threads * 2 * channels, 0.0);
    by_lines(map, threads, [&](int64_t b, int64_t first, int64_t last, int thread) {
        double* own = sums.data() + (b * threads + thread) * 2 * channels;
        std::vector<float> part(2 * channels, 0.0f);
        int64_t count = 0;
        const auto flush = [&] {
            for (int64_t c = 0; c < 2 * channels; c++) own[c] += part[c], part[c] = 0;
            count = 0;
        };
        for (int64_t n = first; n < last; n++)
            for (int64_t w = 0; w < map.width; w++) {
                add(b, n, w, part.data(), part.data() + channels);
                if (++count == BLOCK) flush();
            }
        flush();
    });
    for (int64_t b = 0; b < map.batch; b++)
        for (int t = 1; t < threads; t++)
            for (int64_t c = 0; c < 2 * channels; c++)
                sums[b * threads * 2 * channels + c] += sums[(b * threads + t) * 2 * channels + c];
    return sums;
}

extern "C" void moments(const Map* y, float* mean, float* squares, int threads) {
    const int64_t channels = y->channels;
    std::vector<float> values(y->batch * channels);  // one value per channel as pivot, against cancellation
    float* pivot = values.data();
    for (int64_t b = 0; b < y->batch; b++)
        for (int64_t c = 0; c < channels; c++) pivot[b * channels + c] = widen(y->line(b, 0)[c]);
    const auto sums = two_sums(
        *y, threads, [=](int64_t b, int64_t n, int64_t w, float* first, float* second) {
            const T* v = y->line(b, n) + w * y->stride[3];
            add_moments(v, pivot + b * channels, first, second, channels);
        }
    );
    const double count = double(y->lines() * y->width);
    for (int64_t b = 0; b < y->batch; b++)
        for (int64_t c = 0; c < channels; c++) {
            const double* s = sums.data() + b * threads * 2 * channels;
            mean[b * channels + c] = float(pivot[b * channels + c] + s[c] / count);
            squares[b * channels + c] = float(std::max(0.0, s[channels + c] - s[c] * s[c] / count));
        }
}

extern "C" void gradient_sums(
    const Map* g, const Map* y, const float* scale, const float* shift, const float* mean,
    const float* inverse, float slope, float* out, int threads
) {
    const int64_t channels = y->channels;
    const auto sums = two_sums(
        *y, threads,
        [=, slope = Slope(slope)](int64_t b, int64_t n, int64_t w, float* first, float* second) {
            const T *u = g->line(b, n) + w * g->stride[3], *v = y->line(b, n) + w * y->stride[3];
            const int64_t k = b * channels;
            add_gradient_sums(u, v, scale + k, shift + k, mean + k, inverse + k, slope, first, second, channels);
        }
    );
    for (int64_t b = 0; b < y->batch; b++)
        for (int64_t c = 0; c < channels; c++)
            for (int k = 0; k < 2; k++)
                out[(k * y->batch + b) * channels + c] =
                    float(sums[b * threads * 2 * channels + k * channels + c]);
}

extern "C" void gradient(
    const Map* g, const Map* y, const Map* out, const float* scale, const float* shift,
    const float* constant, const float* linear, float slope, int threads
) {
    const int64_t channels = y->channels;
    by_lines(*y, threads, [=, slope = Slope(slope)](int64_t b, int64_t first, int64_t last, int) {
        const int64_t k = b * channels;
        for (int64_t n = first; n < last; n++) {
            const T *u = g->line(b, n), *v = y->line(b, n);
            T* to = out->line(b, n);
            for (int64_t w = 0; w < y->width; w++) {
                gradient_voxel(u, v, to, scale + k, shift + k, constant + k, linear + k, slope, channels);
                u += g->stride[3], v += y->stride[3], to += out->stride[3];
            }
        }
    });
}
