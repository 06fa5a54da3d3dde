// y[m, n] = sum_k x[m, k] * w[n, k] for a gqs weight with groups of 16 in 4 or 8 bits, and m of 1 to TOKENS.
//
// A launch may begin before the kernel before it has ended. Until then it uses nothing it reads, but has L2 bring the weight: that
// keeps whoever still writes it from nothing, and memory is idle while the last blocks of a kernel finish.
//
// Compiled for SCALAR (__half or __nv_bfloat16, of x, scale, bias and y), BITS (4 or 8), TOKENS (1 or 2 by codes, 8 or 16 by
// weights), ROUNDED (1: x is rounded to 8 bits), OWN (1: a block for each tile; 0: Stream-K), WARPS (of a block), BATCH (chunks
// that a warp multiplies at once), BLOCKS (of a processor, for registers), PIECE and SLOTS (see stream.cuh) and WHOLE (1: k is a
// multiple of 256 columns, and x is aligned to 16 bytes).

#if OWN
#include "own_tile.cuh"
#else
#include "stream_k.cuh"
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) semisparse_gqs_decode(
    // Not __restrict__: loads that the compiler takes for constants could move before the wait for the previous kernel.
    const SCALAR* x,            // [m, k]
    const uint2* masks,         // [chunks]
    const Word* starts,         // [chunks + 1]
    const char* codes,          // [kept, kGroupBytes]
    const char* scale,          // [kept], a SCALAR each
    const char* zero,           // [kept]
    const SCALAR* bias,         // [n] or null
    SCALAR* __restrict__ y,     // [m, n]
    int m, int n, int k, int tile_chunks, int chunks, int kept,
    int each, int more,         // a block's tiles, and how many blocks have one more
    int ahead                   // groups that a warp has L2 bring before anything else
) {
    extern __shared__ uint4 shared[];  // the warps' streams, then what products keep there
    const Weight weight = {masks, starts, codes, scale, zero, chunks, kept};
    const Division division(tile_chunks, each, more);
    const int warp = warp_of_block();
    weight.prefetch(division.first, division.last, ahead);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const Product::Asked asked{x, m, k};
    const Word at = smem_address(shared);
    Stream stream(weight, pinned(at + warp * kStreamBytes), division.first, division.last);
    Product product(asked, at + WARPS * kStreamBytes);
    division.sum(stream, product, {bias, y, m, n, product});
}
