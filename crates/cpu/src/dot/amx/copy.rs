//! Copies a unit's weights into tiles, for units without an overlapped copy: a tile's first unit, and incomplete units.

use super::GROUP;
use super::schedule::WeightUnit;
use crate::dot::pack::Line;
use flash_sampling_core::Matrix;

/// Copies a unit: a pair of tiles per step, 32 lines. Missing rows and elements are zero.
pub(super) fn copy_unit(weight: &Matrix<'_>, unit: &WeightUnit, tiles: &mut [Line]) {
    let first = unit.group * GROUP;
    let rows = GROUP.min(weight.rows() - first);
    let end = (weight.cols() * 2).min((unit.from + unit.steps) * 64);
    if !unit.whole {
        tiles[..unit.steps * GROUP].fill(Line::ZERO);
    }
    for row in 0..rows {
        let bytes = &weight.row_bytes(first + row)[unit.from * 64..end];
        for (step, bytes) in bytes.chunks(64).enumerate() {
            tiles[step * GROUP + row].0[..bytes.len()].copy_from_slice(bytes);
        }
    }
}
