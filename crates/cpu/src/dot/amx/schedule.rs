//! The order of a tile's units.

use super::{GROUP, GROUPS, TILE_BYTES};
use flash_sampling_core::Matrix;

/// The maximum number of steps of a unit: two tiles of weights per step, 16 KiB in total.
pub(super) const CHUNK: usize = 8;
/// The bytes of the second-level cache that a slab of the batch may use.
const SLAB_BYTES: usize = 1 << 19;
/// A batch of up to this many bytes needs no slabs.
const WHOLE_BYTES: usize = 1 << 20;

/// 32 weight rows by some steps.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct WeightUnit {
    /// The index of the 32 rows in the tile.
    pub(super) group: usize,
    /// The first step.
    pub(super) from: usize,
    /// Steps, at most [`CHUNK`].
    pub(super) steps: usize,
    /// Whether no row and no element is missing.
    pub(super) whole: bool,
}

/// The units of a tile: ordered by slab, then by group, then by chunk.
pub(super) struct Schedule {
    first: *const u8,
    stride: usize,
    rows: usize,
    cols: usize,
    /// Steps per chunk, chunks over hidden, chunks per slab, groups per tile.
    chunk: usize,
    chunks: usize,
    slab: usize,
    groups: usize,
}

impl Schedule {
    /// Creates the units of a tile of the weight, for this many panels of hidden states.
    pub(super) fn new(weight: &Matrix<'_>, panels: usize) -> Self {
        let steps = weight.cols().div_ceil(32);
        let chunks = steps.div_ceil(CHUNK);
        // Chunks of one size, if possible: the copy overlaps only units of its own size.
        let chunk = steps.div_ceil(chunks);
        let chunks = steps.div_ceil(chunk);
        let slab = match steps * panels * TILE_BYTES {
            0..=WHOLE_BYTES => chunks,
            _ => (SLAB_BYTES / (panels * TILE_BYTES * chunk)).clamp(1, chunks),
        };
        Schedule {
            first: weight.bytes().as_ptr(),
            stride: weight.row_stride() * 2,
            rows: weight.rows(),
            cols: weight.cols(),
            chunk,
            chunks,
            slab,
            groups: weight.rows().div_ceil(GROUP),
        }
    }

    /// Returns the number of units.
    pub(super) fn len(&self) -> usize {
        self.groups * self.chunks
    }

    /// Bytes between weight rows.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// Returns unit `i`, which is below [`Schedule::len`].
    pub(super) fn unit(&self, i: usize) -> WeightUnit {
        let (slab, at) = (i / (self.groups * self.slab), i % (self.groups * self.slab));
        let width = self.slab.min(self.chunks - slab * self.slab);
        let (group, from) = (at / width, (slab * self.slab + at % width) * self.chunk);
        let steps = self.chunk.min(self.cols.div_ceil(32) - from);
        let whole = (group + 1) * GROUP <= self.rows && (from + steps) * 32 <= self.cols;
        WeightUnit { group, from, steps, whole }
    }

    /// Returns the address of a unit's first row, for a prefetch. Units beyond the last one may belong to the next
    /// tile.
    pub(super) fn address(&self, i: usize) -> *const u8 {
        let unit = self.unit(i % self.len());
        let row = i / self.len() * GROUPS * GROUP + unit.group * GROUP;
        self.first.wrapping_add(row * self.stride + unit.from * 64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dot::TILE;
    use half::bf16;

    #[test]
    fn every_step_of_every_group_comes_once_and_in_ascending_order() {
        const { assert!(GROUPS * GROUP == TILE) }
        for (rows, cols, panels) in
            [(1, 1, 1), (256, 4096, 4), (250, 4096, 16), (33, 900, 8), (96, 5000, 64), (64, 320, 2)]
        {
            let data = vec![bf16::ZERO; rows * cols];
            let weight = Matrix::new(&data, rows, cols).unwrap();
            let schedule = Schedule::new(&weight, panels);
            let mut next = vec![0; rows.div_ceil(GROUP)];
            for i in 0..schedule.len() {
                let unit = schedule.unit(i);
                assert!(unit.from == next[unit.group] && (1..=CHUNK).contains(&unit.steps), "{unit:?}");
                next[unit.group] += unit.steps;
                let whole = rows >= (unit.group + 1) * GROUP && cols >= next[unit.group] * 32;
                assert_eq!(unit.whole, whole, "{unit:?}");
            }
            assert!(next.iter().all(|&steps| steps == cols.div_ceil(32)));
        }
    }
}
