// weight[n, k], zero before, from an ec_csr weight in the layout `banks`: a warp a segment, each lane its list.
//
// Compiled for SCALAR (an unsigned integer of the weight's size), DELTA_BITS (4 or 8), INDEX (unsigned short or unsigned
// int, of bases) and PANEL_ROWS (32 or 64).

constexpr int kWarp = 32;
constexpr int kPanelRows = PANEL_ROWS;
constexpr int kSegments = 16;
constexpr int kVector = 16 / sizeof(SCALAR);

extern "C" __global__ void __launch_bounds__(kSegments* kWarp) semisparse_ec_csr_unpack(
    const SCALAR* __restrict__ values,         // [loads, 32, kVector]
    const unsigned char* __restrict__ deltas,  // [loads, 32, kVector * DELTA_BITS / 8]
    const INDEX* __restrict__ bases,           // [panels, 16, 32]
    const int* __restrict__ panel_loads,       // [panels + 1]
    SCALAR* __restrict__ weight,               // [n, k]
    int k
) {
    const int segment = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int height = (k + kWarp - 1) / kWarp;
    const int start = panel_loads[blockIdx.x], loads = panel_loads[blockIdx.x + 1] - start;
    int place = bases[blockIdx.x * blockDim.x + threadIdx.x];
    for (int load = segment * loads / kSegments; load < (segment + 1) * loads / kSegments; ++load) {
        const long long first = ((long long)(start + load) * kWarp + lane) * kVector;
        for (int step = 0; step < kVector; ++step) {
            const long long at = first + step;
            place += DELTA_BITS == 8 ? deltas[at] : deltas[at / 2] >> 4 * (at % 2) & 15;
            const SCALAR value = values[at];
            // A zero of either sign is padding, or lies past column k.
            if (static_cast<SCALAR>(value << 1) == 0) continue;
            const long long row = (long long)blockIdx.x * kPanelRows + place / height;
            weight[row * k + place % height * kWarp + lane] = value;
        }
    }
}
