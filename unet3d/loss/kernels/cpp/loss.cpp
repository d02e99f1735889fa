// Sums behind Dice and cross-entropy of a softmax over logits, and the gradient of the logits.

#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.h"

using T = ELEMENT;

constexpr int L = 8;  // voxels in a register
constexpr int TILE = 16 * L;  // voxels whose probabilities are held at once
constexpr int32_t IGNORED = -1;

inline F<L> at(const float* values, int v) { return read<F<L>>(values + v); }

// (B, K, V), each class or each voxel contiguous; the strides are those of K and V.
struct Logits {
    const T* data;
    int64_t batch, classes, voxels, stride[2], label_bytes;

    int64_t at(int64_t b, int64_t k, int64_t v) const {
        return b * classes * voxels + k * stride[0] + v * stride[1];
    }
};

// Probabilities of a tile, class by class, and its labels. Voxels beyond the last one are ignored.
struct Tile {
    const Logits& logits;
    int64_t b, first, count;
    std::vector<float> p;
    float logarithm[TILE];  // of the sum of exponentials
    int32_t label[TILE];

    explicit Tile(const Logits& logits) : logits(logits), p(logits.classes * TILE) {}

    template <class Label> void load_labels(const Label* labels, Label ignored) {
        for (int64_t v = 0; v < count; v++) label[v] = labels[v] == ignored ? IGNORED : labels[v];
    }

    void load(const void* labels, int64_t volume, int64_t start) {
        b = volume, first = start, count = std::min<int64_t>(TILE, logits.voxels - start);
        std::fill(label, label + TILE, IGNORED);
        const int64_t from = b * logits.voxels + first;
        if (logits.label_bytes == 1)
            load_labels(static_cast<const uint8_t*>(labels) + from, uint8_t(255));
        else
            load_labels(static_cast<const int16_t*>(labels) + from, int16_t(32767));
        for (int64_t k = 0; k < logits.classes; k++)
            for (int64_t v = 0; v < count; v++) of(k)[v] = logit(k, v);
        for (int v = 0; v < TILE; v += L) {
            F<L> top = at(of(0), v), total{};
            for (int64_t k = 1; k < logits.classes; k++) top = greater(top, at(of(k), v));
            for (int64_t k = 0; k < logits.classes; k++) {
                const F<L> d = at(of(k), v) - top;
                const F<L> e = d == d ? exponential<L>(d) : d;  // NaN stays NaN
                write(of(k) + v, e);
                total += e;
            }
            for (int64_t k = 0; k < logits.classes; k++) write(of(k) + v, at(of(k), v) / total);
            for (int l = 0; l < L; l++) logarithm[v + l] = top[l] + std::log(total[l]);
        }
    }

    float* of(int64_t k) { return p.data() + k * TILE; }
    I<L> labels(int v) const { return read<I<L>>(label + v); }
    float logit(int64_t k, int64_t v) const { return widen(logits.data[logits.at(b, k, first + v)]); }
};

// Calls body(tile, thread) on the tiles of each volume, split among threads.
template <class Body>
static void by_tiles(const Logits& logits, const void* labels, int threads, Body body) {
    const int64_t tiles = (logits.voxels + TILE - 1) / TILE;
#pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1)
    for (int64_t b = 0; b < logits.batch; b++)
        for (int t = 0; t < threads; t++) {
            Tile tile(logits);
            for (int64_t n = tiles * t / threads; n < tiles * (t + 1) / threads; n++) {
                tile.load(labels, b, n * TILE);
                body(tile, t);
            }
        }
}

// Writes the sums of ClassSums, (5, B, K); `counted` is equal to `reference`.
extern "C" void sums(const Logits* logits, const void* labels, float* out, int threads) {
    const int64_t batch = logits->batch, classes = logits->classes;
    std::vector<double> parts(batch * threads * 4 * classes, 0.0);
    by_tiles(*logits, labels, threads, [&](Tile& tile, int thread) {
        double* own = parts.data() + (tile.b * threads + thread) * 4 * classes;
        for (int64_t k = 0; k < classes; k++) {
            F<L> predicted{};
            for (int v = 0; v < TILE; v += L)
                predicted += tile.labels(v) != IGNORED ? at(tile.of(k), v) : F<L>{};
            for (int l = 0; l < L; l++) own[classes + k] += predicted[l];
        }
        for (int64_t v = 0; v < tile.count; v++) {
            const int64_t y = tile.label[v];
            if (y < 0 || y >= classes) continue;
            own[y] += tile.of(y)[v];
            own[2 * classes + y] += tile.logarithm[v] - tile.logit(y, v);
            own[3 * classes + y] += 1;
        }
    });
    for (int64_t b = 0; b < batch; b++)
        for (int64_t term = 0; term < 5; term++)
            for (int64_t k = 0; k < classes; k++) {
                const int64_t n = std::min<int64_t>(term, 3) * classes + k;
                double total = 0;
                for (int t = 0; t < threads; t++) total += parts[(b * threads + t) * 4 * classes + n];
                out[(term * batch + b) * classes + k] = float(total);
            }
}

// Writes the gradient of the logits, given that of the first three sums, (3, B, K).
extern "C" void gradient(
    const Logits* logits, const void* labels, const float* grad, T* out, int threads
) {
    const int64_t batch = logits->batch, classes = logits->classes;
    by_tiles(*logits, labels, threads, [&](Tile& tile, int) {
        const float* by_overlap = grad + tile.b * classes;
        const float* by_predicted = by_overlap + batch * classes;
        const float* by_entropy = by_predicted + batch * classes;
        for (int v = 0; v < TILE; v += L) {
            const I<L> y = tile.labels(v);
            F<L> shared{}, own{};  // parts of the gradient: of every class, and of the label's
            for (int64_t k = 0; k < classes; k++) {
                const F<L> p = at(tile.of(k), v), overlap = p * by_overlap[k];
                shared -= p * by_predicted[k];
                own = y == int32_t(k) ? overlap - by_entropy[k] : own;
            }
            shared -= own;
            for (int64_t k = 0; k < classes; k++) {
                const F<L> g = at(tile.of(k), v) * (by_predicted[k] + shared);
                const F<L> total = y == int32_t(k) ? g + own : g;
                write(tile.of(k) + v, y != IGNORED ? total : F<L>{});
            }
        }
        for (int64_t k = 0; k < classes; k++)
            for (int64_t v = 0; v < tile.count; v++)
                out[logits->at(tile.b, k, tile.first + v)] = narrow<T>(tile.of(k)[v]);
    });
}
