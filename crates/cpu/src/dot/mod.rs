//! Dot products of one vocabulary tile with every hidden state of the batch. README.md in this folder has the design.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
pub(crate) mod blocks;
mod entry_points;
mod lanes;
#[cfg(target_arch = "aarch64")]
mod neon;
pub(crate) mod pack;
mod portable;

use crate::isa::Isa;
use flash_sampling_core::{DType, Matrix};
use pack::{Layout, PackedRows};

/// Tokens per tile. The logits of a tile are `[rows, TILE]`; no larger array of logits exists.
pub(crate) const TILE: usize = 256;

/// The memory for the dot products of one worker.
#[derive(Debug, Default)]
pub(crate) struct DotScratch {
    /// AMX accumulators, ordered by tile.
    #[cfg(target_arch = "x86_64")]
    pub(crate) sums: Vec<pack::Line>,
    /// Weight rows copied into AMX tiles.
    #[cfg(target_arch = "x86_64")]
    pub(crate) tiles: Vec<pack::Line>,
    /// Decoded rows of a quantised weight, or codes and scales of some rows.
    pub(crate) decoded: Vec<pack::Line>,
    /// Integer sums.
    #[cfg(target_arch = "x86_64")]
    pub(crate) integers: Vec<f32>,
}

impl DotScratch {
    /// Reserves memory for upper bounds.
    pub(crate) fn reserve_for_bounds(&mut self, memory: &crate::upper_bounds::BoundsMemory) {
        reserve(&mut self.decoded, memory.codes / 4);
        #[cfg(target_arch = "x86_64")]
        self.integers.reserve(memory.integers);
    }
}

/// The dot products with one weight, on one instruction set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dot {
    isa: Isa,
    weight: DType,
}

impl Dot {
    /// Chooses the kernel for these types on an available instruction set.
    pub(crate) fn new(isa: Isa, weight: DType, hidden: DType) -> Self {
        assert!(isa.is_available(), "{isa} was checked at planning");
        Dot { isa: isa.for_types(weight, hidden), weight }
    }

    /// Returns the layout of the hidden states for this kernel.
    pub(crate) fn layout(&self) -> Layout {
        match (self.isa, self.weight) {
            (Isa::Amx, _) => Layout::Amx,
            (Isa::Avx512Bf16, _) => Layout::Bf16,
            (Isa::Avx512, DType::BF16) => Layout::EvenOdd { step: 32 },
            (Isa::Avx2, DType::BF16) => Layout::EvenOdd { step: 16 },
            _ => Layout::F32,
        }
    }

    /// Creates a worker's scratch for a weight's type and up to `rows` rows on an instruction set.
    pub(crate) fn scratch(isa: Isa, weight: DType, rows: usize) -> DotScratch {
        let mut scratch = DotScratch::default();
        #[cfg(target_arch = "x86_64")]
        if isa == Isa::Amx {
            // Integer products have two rows of digits for a hidden row.
            scratch = amx::scratch(rows.max(2 * rows.min(crate::upper_bounds::MAX_ROWS)));
        }
        let isa = isa.for_types(weight, DType::BF16);
        scratch.decoded = blocks::scratch(isa, weight, rows);
        scratch
    }

    /// Writes to `out[r * TILE + i]` the product of row `i` of `weight` (at most [`TILE`] rows) and row `r` of
    /// `hidden`.
    pub(crate) fn tile(&self, weight: &Matrix<'_>, hidden: PackedRows<'_>, out: &mut [f32], scratch: &mut DotScratch) {
        assert!(weight.rows() <= TILE && weight.dtype() == self.weight);
        assert!(weight.cols() == hidden.cols() && hidden.layout() == self.layout());
        assert!(out.len() >= hidden.rows().saturating_sub(1) * TILE + weight.rows());
        if blocks::decodes(self.isa, weight.dtype(), hidden.rows()) {
            return self.decoded_tile(weight, hidden, out, scratch);
        }
        match self.isa {
            // SAFETY: `new` has checked that the instruction set is available; the asserts above check the other
            // requirements.
            Isa::Portable => unsafe { portable::tile(weight, hidden, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2::tile(weight, hidden, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { avx512::tile(weight, hidden, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => unsafe { avx512_bf16::tile(weight, hidden, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => unsafe { amx::tile(weight, hidden, out, scratch) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => unsafe { neon::tile(weight, hidden, out) },
            isa => unreachable!("{isa} is not available on this architecture"),
        }
    }
}

/// Makes room for decoded rows. Allocates only for rows of 16 Ki weights or more, and once.
pub(crate) fn reserve(decoded: &mut Vec<pack::Line>, floats: usize) {
    if decoded.len() < floats.div_ceil(16) {
        decoded.resize(floats.div_ceil(16), pack::Line::ZERO);
    }
}

impl Dot {
    /// [`Dot::tile`] for a quantised weight and many hidden rows: decodes some weight rows at a time.
    fn decoded_tile(&self, weight: &Matrix<'_>, hidden: PackedRows<'_>, out: &mut [f32], scratch: &mut DotScratch) {
        let (count, stride) = blocks::decoded_size(weight.cols());
        let mut decoded = core::mem::take(&mut scratch.decoded);
        reserve(&mut decoded, count * stride);
        let floats = Dot { weight: DType::F32, ..*self };
        for at in (0..weight.rows()).step_by(count) {
            let rows = weight.row_range(at..weight.rows().min(at + count));
            self.decode(&rows, stride, pack::floats_mut(&mut decoded));
            let wide = Matrix::from_bytes(pack::bytes(&decoded), DType::F32, rows.rows(), rows.cols(), stride);
            floats.tile(&wide.expect("the memory has these rows"), hidden, &mut out[at..], scratch);
        }
        scratch.decoded = decoded;
    }

    /// Writes the rows of a quantised weight as floats, `stride` floats apart.
    fn decode(&self, weight: &Matrix<'_>, stride: usize, out: &mut [f32]) {
        match self.isa {
            // SAFETY: `new` has checked that the instruction set is available.
            Isa::Portable => unsafe { portable::decode(weight, stride, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2::decode(weight, stride, out) },
            // SAFETY: as above. The other instruction sets are for floats only.
            #[cfg(target_arch = "x86_64")]
            _ => unsafe { avx512::decode(weight, stride, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => unsafe { neon::decode(weight, stride, out) },
            #[cfg(not(target_arch = "x86_64"))]
            isa => unreachable!("{isa} is not available on this architecture"),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
