// weight[n, k], zero before, from an ec_csr weight in either layout: a warp a bundle, each lane its list of columns.
//
// Compiled for SCALAR (an unsigned integer of the weight's size), DELTA_BITS (4 or 8), INDEX (unsigned short or unsigned
// int, of base columns) and SHARED (1 if a bundle's lanes share their rows, as in `paper`).

struct Bundle {
    int granularity, vector, columns, first_delta, first_value, first_slot;
};

constexpr int kWarp = 32;

extern "C" __global__ void semisparse_ec_csr_unpack(
    const SCALAR* __restrict__ values,        // [values]
    const unsigned char* __restrict__ deltas,  // [deltas * DELTA_BITS / 8]
    const INDEX* __restrict__ bases,          // [bundles, 32]
    const Bundle* __restrict__ bundles,       // [bundles]
    const int* __restrict__ rows,             // [slots], -1 for those of no block
    SCALAR* __restrict__ weight,              // [n, pitch]
    int count, int pitch                      // count: of bundles
) {
    const int number = (blockIdx.x * blockDim.x + threadIdx.x) / kWarp;
    if (number >= count) return;
    const int lane = threadIdx.x % kWarp;
    const Bundle bundle = bundles[number];
    const int* own = rows + bundle.first_slot + (SHARED ? 0 : lane * bundle.granularity);
    long long column = bases[number * kWarp + lane];
    for (int step = 0; step < bundle.columns; ++step) {
        const int inside = (step / bundle.vector * kWarp + lane) * bundle.vector + step % bundle.vector;
        const int delta = bundle.first_delta + inside;
        column += DELTA_BITS == 8 ? deltas[delta] : deltas[delta / 2] >> 4 * (delta % 2) & 15;
        for (int row = 0; row < bundle.granularity; ++row) {
            const SCALAR value = values[bundle.first_value + (long long)inside * bundle.granularity + row];
            // A zero of either sign is padding; the weight at its column, if there is one, belongs to another block.
            if (static_cast<SCALAR>(value << 1) != 0) weight[own[row] * (long long)pitch + column] = value;
        }
    }
}
