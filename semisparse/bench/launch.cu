// What a launch costs apart from its work: nothing, and the least real work.

extern "C" __global__ void semisparse_nothing() {}

extern "C" __global__ void semisparse_copy(const float* from, float* to, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = from[i];
}
