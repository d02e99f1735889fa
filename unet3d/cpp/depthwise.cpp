// Gradient of the weight of a depthwise convolution of channels-last maps.

#include "simd.h"

using T = ELEMENT;

// Maps (B, D, H, W, C); sizes, stride and padding by axis.
struct Job {
    int64_t batch, channels, input[3], output[3], kernel[3], stride[3], padding[3], threads;
};

// Add K taps, the first at offset `from`, over one row of the output, for L channels.
template <int K, int L> void add_row(const Job& job, const T* x, const T* g, int64_t from, float* sums) {
    const int64_t channels = job.channels, stride = job.stride[2], width = job.input[2];
    F<L> taps[K]{};
    for (int64_t w = 0; w < job.output[2]; w++) {
        const F<L> upper = Elements<T, L>::load(g + w * channels);
        const int64_t first = w * stride + from;
        if (first >= 0 && first + K <= width)
            for (int k = 0; k < K; k++) taps[k] += upper * Elements<T, L>::load(x + (first + k) * channels);
        else
            for (int k = 0; k < K; k++)
                if (first + k >= 0 && first + k < width)
                    taps[k] += upper * Elements<T, L>::load(x + (first + k) * channels);
    }
    for (int k = 0; k < K; k++) {
        float* sum = sums + k * channels;
        write(sum, read<F<L>>(sum) + taps[k]);
    }
}

// All taps of plane i of the kernel, for L channels from `channel`.
template <int L> void add_plane(const Job& job, const T* x, const T* g, int64_t i, int64_t channel, float* sums) {
    const int64_t* in = job.input;
    const int64_t* out = job.output;
    const int64_t width = job.kernel[2];
    for (int64_t b = 0; b < job.batch; b++)
        for (int64_t d = 0; d < out[0]; d++) {
            const int64_t z = d * job.stride[0] + i - job.padding[0];
            if (z < 0 || z >= in[0]) continue;
            for (int64_t h = 0; h < out[1]; h++)
                for (int64_t j = 0; j < job.kernel[1]; j++) {
                    const int64_t y = h * job.stride[1] + j - job.padding[1];
                    if (y < 0 || y >= in[1]) continue;
                    const T* xs = x + ((b * in[0] + z) * in[1] + y) * in[2] * job.channels + channel;
                    const T* gs = g + ((b * out[0] + d) * out[1] + h) * out[2] * job.channels + channel;
                    for (int64_t k = 0, taps; k < width; k += taps) {
                        taps = width - k >= 5 ? 5 : width - k >= 3 ? 3 : 1;
                        float* to = sums + ((i * job.kernel[1] + j) * width + k) * job.channels + channel;
                        const auto add = taps == 5 ? add_row<5, L> : taps == 3 ? add_row<3, L> : add_row<1, L>;
                        add(job, xs, gs, k - job.padding[2], to);
                    }
                }
        }
}

// Sums are (D, H, W, C) of the kernel and begin at 0. Each thread has its own, so that their bits
// do not depend on the number of threads.
extern "C" void weight_gradient(const Job* given, const T* x, const T* g, float* sums) {
    const Job& job = *given;
    const int64_t blocks = (job.channels + 15) / 16;
#pragma omp parallel for collapse(2) num_threads(job.threads) schedule(dynamic)
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t i = 0; i < job.kernel[0]; i++) {
            int64_t c = block * 16;
            if (c + 16 <= job.channels) {
                add_plane<16>(job, x, g, i, c, sums);
                continue;
            }
            for (; c + 4 <= job.channels; c += 4) add_plane<4>(job, x, g, i, c, sums);
            for (; c < job.channels; c++) add_plane<1>(job, x, g, i, c, sums);
        }
}
