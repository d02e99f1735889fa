// The arguments of the kernels: a pooling, the encoding of its selection, and its windows.
#pragma once

#include <cstdint>

enum Pool { MEDIAN, MAX, AVG, APPROX };
enum Code { NONE, MASK, INDEX, PAIR, TWO };  // see argmax_codes.py

constexpr int MOST = 256;  // elements in a window

// A tensor is (outer, D, H, W, inner); outer and inner are B * C and 1 when contiguous, B and C when
// channels-last.
struct Grid {
    int64_t outer, in[3], inner, out[3], size[3], stride[3], padding[3];

    int64_t elements() const { return size[0] * size[1] * size[2]; }
    int64_t row() const { return out[2] * inner; }
    int64_t outputs() const { return outer * out[0] * out[1] * row(); }
    int64_t input_row(int64_t o, int64_t d, int64_t h) const {
        return ((o * in[0] + d) * in[1] + h) * in[2] * inner;
    }
    bool tiles(int64_t d, int64_t h, int64_t w) const {
        const int64_t k[3] = {d, h, w};
        for (int a = 0; a < 3; a++)
            if (size[a] != k[a] || stride[a] != k[a] || padding[a]) return false;
        return true;
    }
};

struct Job {
    Grid grid;
    int64_t pool, code, threads, comparators;
    const int32_t* network;
    double tau;
};
