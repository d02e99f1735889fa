// Trilinear (corners aligned) or nearest upsampling of channels-last maps, and its transpose.
#pragma once

#include <utility>
#include <vector>

#include "map.h"

// Positions along an axis: from `first`, of `size`; coarser ones from `low_first`, of `low_size`.
struct Axis {
    int64_t first, size, low_first, low_size;

    // A position's two coarser neighbors, counted from low_first, and the second's weight.
    void neighbors(int64_t position, bool linear, int64_t& a, int64_t& b, float& weight) const {
        if (!linear) {
            a = b = position * low_size / size - low_first;
            weight = 0;
            return;
        }
        const double at = size > 1 ? double(position) * double(low_size - 1) / double(size - 1) : 0.0;
        a = std::min(int64_t(at), low_size - 1);
        weight = float(at - double(a));
        b = std::min(a + 1, low_size - 1) - low_first;
        a -= low_first;
    }
};

struct Neighbors {
    int64_t a, b;
    float weight;
};

static std::vector<Neighbors> find_neighbors(const Axis& axis, int64_t rows, bool linear) {
    std::vector<Neighbors> result(rows);
    for (int64_t n = 0; n < rows; n++)
        axis.neighbors(axis.first + n, linear, result[n].a, result[n].b, result[n].weight);
    return result;
}

// The positions that read each coarser position, with their weights.
static std::vector<std::vector<std::pair<int64_t, float>>> find_readers(
    const std::vector<Neighbors>& neighbors, int64_t low_rows
) {
    std::vector<std::vector<std::pair<int64_t, float>>> result(low_rows);
    for (int64_t n = 0; n < int64_t(neighbors.size()); n++) {
        result[neighbors[n].a].push_back({n, 1 - neighbors[n].weight});
        if (neighbors[n].weight > 0) result[neighbors[n].b].push_back({n, neighbors[n].weight});
    }
    return result;
}

static inline void add_line(const T* from, int64_t step, float weight, float* __restrict line,
                            int64_t width, int64_t channels) {
    for (int64_t w = 0; w < width; w++, from += step, line += channels)
#pragma omp simd
        for (int64_t c = 0; c < channels; c++) line[c] += weight * widen(from[c]);
}

static inline void blend(const float* __restrict a, const float* __restrict b, float weight,
                         T* __restrict out, int64_t channels) {
#pragma omp simd
    for (int64_t c = 0; c < channels; c++) narrow(a[c] + weight * (b[c] - a[c]), out + c);
}

extern "C" void interpolate(
    const Map* low, const Map* out, const Axis* axes, int linear, int threads
) {
    const int64_t channels = out->channels;
    const auto deep = find_neighbors(axes[0], out->depth, linear), high = find_neighbors(axes[1], out->height, linear);
    const auto wide = find_neighbors(axes[2], out->width, linear);
    by_lines(*out, threads, [&](int64_t b, int64_t first, int64_t last, int) {
        std::vector<float> line(low->width * channels);
        for (int64_t n = first; n < last; n++) {
            const Neighbors &d = deep[n / out->height], &h = high[n % out->height];
            std::fill(line.begin(), line.end(), 0.0f);
            for (int k = 0; k < 4; k++) {
                const float weight =
                    (k / 2 ? d.weight : 1 - d.weight) * (k % 2 ? h.weight : 1 - h.weight);
                if (weight == 0) continue;
                const int64_t at = (k / 2 ? d.b : d.a) * low->height + (k % 2 ? h.b : h.a);
                add_line(low->line(b, at), low->stride[3], weight, line.data(), low->width, channels);
            }
            T* to = out->line(b, n);
            for (int64_t w = 0; w < out->width; w++, to += out->stride[3])
                blend(line.data() + wide[w].a * channels, line.data() + wide[w].b * channels,
                    wide[w].weight, to, channels);
        }
    });
}

static inline void add_voxel(const float* __restrict from, float weight, float* __restrict to,
                             int64_t channels) {
#pragma omp simd
    for (int64_t c = 0; c < channels; c++) to[c] += weight * from[c];
}

static inline void add_to(const float* __restrict from, T* to, int64_t channels) {
#pragma omp simd
    for (int64_t c = 0; c < channels; c++) narrow(widen(to[c]) + from[c], to + c);
}

// Adds to `low`: each coarser line gathers from the lines that read it.
extern "C" void interpolate_gradient(
    const Map* g, const Map* low, const Axis* axes, int linear, int threads
) {
    const int64_t channels = g->channels;
    const auto deep = find_readers(find_neighbors(axes[0], g->depth, linear), low->depth);
    const auto high = find_readers(find_neighbors(axes[1], g->height, linear), low->height);
    const auto wide = find_neighbors(axes[2], g->width, linear);
    by_lines(*low, threads, [&](int64_t b, int64_t first, int64_t last, int) {
        std::vector<float> line(g->width * channels), sum(low->width * channels);
        for (int64_t n = first; n < last; n++) {
            std::fill(line.begin(), line.end(), 0.0f);
            std::fill(sum.begin(), sum.end(), 0.0f);
            for (const auto& [d, by_d] : deep[n / low->height])
                for (const auto& [h, by_h] : high[n % low->height])
                    add_line(g->line(b, d * g->height + h), g->stride[3], by_d * by_h, line.data(),
                             g->width, channels);
            for (int64_t w = 0; w < g->width; w++) {
                const float* from = line.data() + w * channels;
                add_voxel(from, 1 - wide[w].weight, sum.data() + wide[w].a * channels, channels);
                if (wide[w].weight > 0)
                    add_voxel(from, wide[w].weight, sum.data() + wide[w].b * channels, channels);
            }
            T* to = low->line(b, n);
            for (int64_t w = 0; w < low->width; w++, to += low->stride[3])
                add_to(sum.data() + w * channels, to, channels);
        }
    });
}
