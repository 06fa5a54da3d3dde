// Which row of the weight a row of a panel is. README.md: `On a GPU`.
//
// Compiled for PANEL_ROWS and PAIRED (0 or 1).

#pragma once

constexpr int kHalfRows = PANEL_ROWS / 2;

// Returns how many rows of a paired panel, its first ones, are of the weight's first half. The last panel may have fewer.
__device__ __forceinline__ int first_half_rows(int panel, int n) { return min(kHalfRows, (n + 1) / 2 - panel * kHalfRows); }

// Returns the row of the weight that is row `row` of a panel, or a number of at least n if there is none.
__device__ __forceinline__ int row_of(int panel, int row, int n) {
    if (!PAIRED) return panel * PANEL_ROWS + row;
    const int in_half = row - first_half_rows(panel, n);
    return panel * kHalfRows + (in_half < 0 ? row : (n + 1) / 2 + in_half);
}
