// Stands in for gqs's sent.cuh. Blocks run one after another, so what one sends waits for the next.

#pragma once

#include "machine.cuh"

template <int count> struct Sent {
    struct Word { float sum; unsigned block; bool sent; };
    static Word& at(int index) { static Word words[count]; return words[index]; }

    void wait() const {}
    void wait_for_next_block() const {}

    void send(int index, float sum) const {
        if (blockIdx.x % CLUSTER == CLUSTER - 1) fail("there is no next block in the cluster");
        if (at(index).sent) fail("sums that nobody took");
        at(index) = {sum, blockIdx.x + 1, true};
    }

    float get(int index) const {
        if (!at(index).sent || at(index).block != blockIdx.x) fail("sums that were not sent");
        at(index).sent = false;
        return at(index).sum;
    }
};
