// Norm, activation and upsampling on channels-last maps, or on some rows or channels of one.

#include <algorithm>
#include <vector>

#include "interpolate.h"
#include "map.h"

constexpr int64_t BLOCK = 64;  // voxels that are summed in float, before double takes over

// What happens to the channels of a voxel. Outputs may be inputs, element by element.
using Numbers = const float* __restrict;

static inline void to_activation(
    const T* y, T* out, Numbers scale, Numbers shift, float slope, int64_t channels
) {
#pragma omp simd
    for (int64_t c = 0; c < channels; c++) {
        const float n = scale[c] * widen(y[c]) + shift[c];
        narrow(n * (n < 0 ? slope : 1.0f), out + c);
    }
}

static inline void to_moments(
    const T* y, Numbers about, float* __restrict first, float* __restrict second, int64_t channels
) {
#pragma omp simd
    for (int64_t c = 0; c < channels; c++) {
        const float d = widen(y[c]) - about[c];
        first[c] += d;
        second[c] += d * d;
    }
}

static inline void to_sums(
    const T* g, const T* y, Numbers scale, Numbers shift, Numbers mean, Numbers inverse,
    float slope, float* __restrict first, float* __restrict second, int64_t channels
) {
#pragma omp simd
    for (int64_t c = 0; c < channels; c++) {
        const float x = widen(y[c]);
        const float m = widen(g[c]) * (scale[c] * x + shift[c] > 0 ? 1.0f : slope);
        first[c] += m;
        second[c] += m * ((x - mean[c]) * inverse[c]);
    }
}

static inline void to_gradient(
    const T* g, const T* y, T* out, Numbers scale, Numbers shift, Numbers constant, Numbers linear,
    float slope, int64_t channels
) {
#pragma omp simd
    for (int64_t c = 0; c < channels; c++) {
        const float x = widen(y[c]);
        const float m = widen(g[c]) * (scale[c] * x + shift[c] > 0 ? 1.0f : slope);
        narrow(scale[c] * m + constant[c] + linear[c] * x, out + c);
    }
}

extern "C" void normalize(
    const Map* y, const Map* out, const float* scale, const float* shift, float slope, int threads
) {
    const int64_t channels = y->channels;
    by_lines(*y, threads, [=](int64_t b, int64_t first, int64_t last, int) {
        const float *s = scale + b * channels, *o = shift + b * channels;
        for (int64_t n = first; n < last; n++) {
            const T* from = y->line(b, n);
            T* to = out->line(b, n);
            for (int64_t w = 0; w < y->width; w++, from += y->stride[3], to += out->stride[3])
                to_activation(from, to, s, o, slope, channels);
        }
    });
}

// Sums per volume, thread and channel: `add` sees a voxel, and two float accumulators for each
// channel, which are added up in double every BLOCK voxels.
template <class Add>
static std::vector<double> two_sums(const Map& map, int threads, Add add) {
    const int64_t channels = map.channels;
    std::vector<double> sums(map.batch * threads * 2 * channels, 0.0);
    by_lines(map, threads, [&](int64_t b, int64_t first, int64_t last, int thread) {
        double* mine = sums.data() + (b * threads + thread) * 2 * channels;
        std::vector<float> part(2 * channels, 0.0f);
        int64_t seen = 0;
        const auto flush = [&] {
            for (int64_t c = 0; c < 2 * channels; c++) mine[c] += part[c], part[c] = 0;
            seen = 0;
        };
        for (int64_t n = first; n < last; n++)
            for (int64_t w = 0; w < map.width; w++) {
                add(b, n, w, part.data(), part.data() + channels);
                if (++seen == BLOCK) flush();
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
    std::vector<float> values(y->batch * channels);  // of each channel one, against cancellation
    float* about = values.data();
    for (int64_t b = 0; b < y->batch; b++)
        for (int64_t c = 0; c < channels; c++) about[b * channels + c] = widen(y->line(b, 0)[c]);
    const auto sums = two_sums(
        *y, threads, [=](int64_t b, int64_t n, int64_t w, float* first, float* second) {
            const T* v = y->line(b, n) + w * y->stride[3];
            to_moments(v, about + b * channels, first, second, channels);
        }
    );
    const double count = double(y->lines() * y->width);
    for (int64_t b = 0; b < y->batch; b++)
        for (int64_t c = 0; c < channels; c++) {
            const double* s = sums.data() + b * threads * 2 * channels;
            mean[b * channels + c] = float(about[b * channels + c] + s[c] / count);
            squares[b * channels + c] = float(std::max(0.0, s[channels + c] - s[c] * s[c] / count));
        }
}

extern "C" void gradient_sums(
    const Map* g, const Map* y, const float* scale, const float* shift, const float* mean,
    const float* inverse, float slope, float* out, int threads
) {
    const int64_t channels = y->channels;
    const auto sums = two_sums(
        *y, threads, [=](int64_t b, int64_t n, int64_t w, float* first, float* second) {
            const T *u = g->line(b, n) + w * g->stride[3], *v = y->line(b, n) + w * y->stride[3];
            const int64_t k = b * channels;
            to_sums(u, v, scale + k, shift + k, mean + k, inverse + k, slope, first, second, channels);
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
    by_lines(*y, threads, [=](int64_t b, int64_t first, int64_t last, int) {
        const int64_t k = b * channels;
        for (int64_t n = first; n < last; n++) {
            const T *u = g->line(b, n), *v = y->line(b, n);
            T* to = out->line(b, n);
            for (int64_t w = 0; w < y->width; w++) {
                to_gradient(u, v, to, scale + k, shift + k, constant + k, linear + k, slope, channels);
                u += g->stride[3], v += y->stride[3], to += out->stride[3];
            }
        }
    });
}
