// The functions that cpu.py calls. ELEMENT is the element type; each has a library of its own.

#include "sliding.h"
#include "tiled.h"

template <class Body> static void by_windows(const Job& job, Body body) {
    if (job.grid.tiles(2, 2, 2)) body(Tiled<ELEMENT, 2, 2, 2>(job));
    else if (job.grid.tiles(1, 2, 2)) body(Tiled<ELEMENT, 1, 2, 2>(job));
    else if (job.grid.tiles(2, 2, 1)) body(Tiled<ELEMENT, 2, 2, 1>(job));
    else body(Sliding<ELEMENT>(job));
}

extern "C" void pool_forward(const Job* job, const ELEMENT* x, ELEMENT* y, uint8_t* code) {
    by_windows(*job, [&](const auto& kernel) { kernel.forward(x, y, code); });
}

extern "C" void pool_backward(
    const Job* job, const ELEMENT* grad, const uint8_t* code, const ELEMENT* x, ELEMENT* to
) {
    by_windows(*job, [&](const auto& kernel) { kernel.backward(grad, code, x, to); });
}
