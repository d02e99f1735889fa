// Sums behind Dice and cross-entropy of a softmax over logits, and the gradient of the logits.

#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.h"

using T = ELEMENT;

constexpr int L = 16;  // voxels in a register
constexpr int TILE = 8 * L;  // voxels whose probabilities are held at once
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

// Exponentials of a tile's logits, class by class, and its labels. Voxels beyond the last one are
// ignored.
struct Tile {
    const Logits& logits;
    int64_t b, first, count;
    std::vector<float> e;
    float top[TILE], inverse[TILE];  // largest logit; 1 over the sum of exponentials
    int32_t label[TILE];

    explicit Tile(const Logits& logits) : logits(logits), e(logits.classes * TILE) {}

    template <class Label> void load_labels(const Label* labels, Label ignored) {
        for (int64_t v = 0; v < count; v++) label[v] = labels[v] == ignored ? IGNORED : labels[v];
    }

    void load_logits() {
        for (int64_t k = 0; k < logits.classes; k++) {
            const T* from = logits.data + logits.at(b, k, first);
            if (logits.stride[1] == 1 && count == TILE)
                for (int v = 0; v < TILE; v += L) write(of(k) + v, Elements<T, L>::load(from + v));
            else
                for (int64_t v = 0; v < count; v++) of(k)[v] = widen(from[v * logits.stride[1]]);
        }
    }

    void store(T* to) {
        for (int64_t k = 0; k < logits.classes; k++) {
            T* out = to + logits.at(b, k, first);
            if (logits.stride[1] == 1 && count == TILE)
                for (int v = 0; v < TILE; v += L) Elements<T, L>::store(out + v, at(of(k), v));
            else
                for (int64_t v = 0; v < count; v++) out[v * logits.stride[1]] = narrow<T>(of(k)[v]);
        }
    }

    void load(const void* labels, int64_t volume, int64_t start) {
        b = volume, first = start, count = std::min<int64_t>(TILE, logits.voxels - start);
        std::fill(label, label + TILE, IGNORED);
        const int64_t from = b * logits.voxels + first;
        if (logits.label_bytes == 1)
            load_labels(static_cast<const uint8_t*>(labels) + from, uint8_t(255));
        else
            load_labels(static_cast<const int16_t*>(labels) + from, int16_t(32767));
        load_logits();
        for (int v = 0; v < TILE; v += L) {
            F<L> most = at(of(0), v), sum{};
            for (int64_t k = 1; k < logits.classes; k++) most = greater(most, at(of(k), v));
            for (int64_t k = 0; k < logits.classes; k++) {
                const F<L> d = at(of(k), v) - most;
                const F<L> power = d == d ? exponential<L>(d) : d;  // NaN stays NaN
                write(of(k) + v, power);
                sum += power;
            }
            write(top + v, most);
            write(inverse + v, 1 / sum);
        }
    }

    float* of(int64_t k) { return e.data() + k * TILE; }
    F<L> p(int64_t k, int v) { return at(of(k), v) * at(inverse, v); }
    I<L> labels(int v) const { return read<I<L>>(label + v); }
    float logit(int64_t k, int64_t v) const { return widen(logits.data[logits.at(b, k, first + v)]); }

    // Calls body(voxel, label, probability) where the label is a class.
    template <class Body> void by_label(Body body) {
        for (int64_t v = 0; v < count; v++)
            if (const int64_t y = label[v]; y >= 0 && y < logits.classes)
                body(v, y, of(y)[v] * inverse[v]);
    }
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
                predicted += tile.labels(v) != IGNORED ? tile.p(k, v) : F<L>{};
            for (int l = 0; l < L; l++) own[classes + k] += predicted[l];
        }
        tile.by_label([&](int64_t v, int64_t y, float p) {
            own[y] += p;
            own[2 * classes + y] += tile.top[v] - std::log(tile.inverse[v]) - tile.logit(y, v);
            own[3 * classes + y] += 1;
        });
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
        float own[TILE] = {};  // the label's part of the gradient
        tile.by_label([&](int64_t v, int64_t y, float p) {
            own[v] = p * by_overlap[y] - by_entropy[y];
        });
        for (int v = 0; v < TILE; v += L) {
            F<L> shared{};
            for (int64_t k = 0; k < classes; k++) shared += tile.p(k, v) * by_predicted[k];
            shared += at(own, v);
            for (int64_t k = 0; k < classes; k++) {
                const F<L> g = tile.p(k, v) * (by_predicted[k] - shared);
                write(tile.of(k) + v, tile.labels(v) != IGNORED ? g : F<L>{});
            }
        }
        tile.by_label([&](int64_t v, int64_t y, float) { tile.of(y)[v] += own[v]; });
        tile.store(out);
    });
}
