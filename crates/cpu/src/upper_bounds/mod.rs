//! Upper bounds of logits from 8-bit products, which select the tokens that may win.
//!
//! Plain version, for a row of a call:
//! ```text
//! for each token: best = merge(best, (logit + gumbel, token))
//! ```
//! Deviations:
//! 1. A token whose upper bound scores below the best score so far cannot win, so its logit is not computed. All
//!    transforms of logits are monotone, also in float32, so an upper bound of a dot product becomes an upper bound of
//!    the score.
//! 2. The kernel of `dot` computes the logit of a token that may win. So the winner has the bits of a pass without
//!    bounds.
//! 3. If a row's first filter is a top-k or a min-p, a token whose upper bound is below the floor of this filter is not
//!    kept. A floor is a lower bound of the smallest kept logit.
//! 4. If a bound is not finite, or many tokens of a tile may win, all logits of the tile are computed
//!    (`scan/tile/possible_winners.rs`).
//!
//! Each element of a hidden state is rounded to an integer of two 8-bit digits. A product is the dot product of these
//! integers and a row of 8-bit codes. The codes come from the head's [`Shadow`](flash_sampling_core::Shadow), or from a
//! quantised weight. In AMX tiles of a quantised weight, the rounding is so coarse that most high digits are zero.
//! Proof of the bounds: `docs/exactness.md`.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod codes;
mod digits;
#[cfg(target_arch = "aarch64")]
mod dotprod;
mod kernel;
mod norms;
#[cfg(target_arch = "x86_64")]
mod panels;
mod plain;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod register_blocks;
#[cfg(target_arch = "x86_64")]
mod slab_scales;
#[cfg(target_arch = "x86_64")]
mod slabs;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod vnni;

#[cfg(target_arch = "x86_64")]
use crate::dot::reserve;
use crate::dot::{DotScratch, TILE};
use crate::isa::Isa;
use crate::options::Threads;
use core::ops::Range;
use digits::DigitLayout;
pub(crate) use digits::Digits;
use flash_sampling_core::backend::canonical::extra_terms;
use flash_sampling_core::backend::{ShadowBound, code_stride};
use flash_sampling_core::{DType, Head, Matrix, Shadow};
use kernel::{Kernel, kernels};
#[cfg(target_arch = "x86_64")]
use panels::multiply_panels;

/// The largest number of columns for which integer sums cannot overflow.
const MAX_COLS: usize = 1 << 17;
/// The largest number of rows of a call with bounds.
pub(crate) const MAX_ROWS: usize = 64;
/// The largest number of draws of a call with bounds. Each draw may need the logits of different tokens.
const MAX_DRAWS: usize = 64;
/// The distance of upper bounds above typical logits that coarse digits cause, in AMX tiles of blocks. At temperature
/// 1, each draw then needs about `exp(3)` = 20 logits.
const WIDTH: f64 = 3.0;

/// The row scales of a quantised weight: all 1, because products already contain the scales of the blocks.
const ONES: [f32; TILE] = [1.0; TILE];

/// The memory of a worker for upper bounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BoundsMemory {
    /// Logits of the tokens that may win.
    pub(crate) logits: usize,
    /// Bytes of a weight row.
    pub(crate) weight_row: usize,
    /// Bytes of the codes and scales of 16 quantised rows, for AMX tiles.
    pub(crate) codes: usize,
    /// Integer sums of AMX tiles over a shadow.
    #[cfg(target_arch = "x86_64")]
    pub(crate) integers: usize,
}

/// The kernels of a head's upper bounds, and the norms of its rows, computed once.
#[derive(Debug)]
pub(crate) struct UpperBounds {
    /// The kernels of this machine for this head: for calls of few rows, and for calls of more rows.
    kernels: [Option<Kernel>; 2],
    /// The norms of a quantised weight's rows, and of their magnitudes; empty for a head with a shadow.
    norms: [Vec<f32>; 2],
    /// The largest sum of a token's norm and error.
    largest_norm: f64,
    /// The number of terms of a dot product, for the bound of its rounding.
    terms: usize,
    /// The largest scale of a hidden row's digits in AMX tiles of blocks.
    coarsest: f32,
}

/// The bytes of a worker's memory for 16 quantised rows: a byte for each code, and at most four bytes of scales and
/// minima for 16 codes of a row.
fn slab_bytes(cols: usize) -> usize {
    cols.next_multiple_of(64) * 20
}

impl UpperBounds {
    /// Prepares upper bounds, if this machine has a kernel for the head. Reads a quantised weight once.
    pub(crate) fn new(head: &Head<'_>, isa: Isa, threads: &Threads) -> Option<Self> {
        let weight = head.weight();
        let has_codes = head.shadow().is_some() || weight.dtype().block_elements() > 1;
        let kernels = kernels(isa, &weight);
        if !has_codes || weight.cols() > MAX_COLS || kernels == [None; 2] {
            return None;
        }
        let (norms, largest_norm) = match head.shadow() {
            Some(shadow) => {
                let sizes = shadow.errors().iter().zip(shadow.norms());
                let sizes = sizes.map(|(error, norm)| f64::from(*error) + f64::from(*norm));
                ([Vec::new(), Vec::new()], sizes.fold(0.0, f64::max))
            }
            None => {
                let norms = norms::of_blocks(&weight, threads);
                let largest = norms[1].iter().copied().fold(0.0, f32::max);
                (norms, f64::from(largest))
            }
        };
        if largest_norm >= 2f64.powi(100) {
            // With such a norm, no hidden state has bounds.
            return None;
        }
        // In AMX tiles of blocks, the products with high and with low digits are added one after the other. Such a
        // partial sum may be larger than the total, so its rounding may be larger.
        let more = if head.shadow().is_none() && kernels[1].is_some() { weight.cols() / 2 } else { 0 };
        let terms = weight.cols() + more + extra_terms(weight.dtype());
        // The mean square of a rounding error is a twelfth of the square of the rounding step.
        let mean_norm = norms[0].iter().map(|&norm| f64::from(norm)).sum::<f64>() / norms[0].len().max(1) as f64;
        let coarsest = WIDTH / ((weight.cols() as f64 / 12.0).sqrt() * mean_norm * f64::from(head.scale()));
        Some(UpperBounds { kernels, norms, largest_norm, terms, coarsest: coarsest as f32 })
    }

    /// The kernel for a call of `rows` rows of this head; `None` if the call is faster without bounds, for any number
    /// of draws.
    fn kernel(&self, head: &Head<'_>, rows: usize) -> Option<Kernel> {
        let is_quantised = !self.norms[0].is_empty();
        if head.shadow().is_some() == is_quantised {
            return None;
        }
        // Measured on a Zen 4, a Zen 5 and a Xeon with AMX (docs/weights.md and docs/shadow.md have the records).
        let (few, most) = match (is_quantised, self.kernels[1].is_some()) {
            // Time of a tile with AMX, divided by the time with VNNI: 1.04 to 1.55 at one row, and 0.44 to 0.60 at 4
            // rows. With a scale for only 16 weights (Q6_K): 2.7 at one row, and 1.0 at 4 rows.
            (true, true) => (if head.weight().dtype() == DType::Q6_K { 4 } else { 1 }, MAX_ROWS),
            (true, false) => (16, 16),
            (false, true) => (4, 16),
            (false, false) => match self.kernels[0] {
                // From 2 rows on, bounds save no time (measured on a Zen 3).
                #[cfg(target_arch = "x86_64")]
                Some(Kernel::Avx2) => (1, 1),
                #[cfg(target_arch = "aarch64")]
                Some(Kernel::Neon) => (1, 1),
                _ => (6, 6),
            },
        };
        let kernel = if rows <= few { self.kernels[0].or(self.kernels[1]) } else { self.kernels[1] };
        kernel.filter(|_| rows <= most)
    }

    /// Whether a call of `rows` rows, with `draws` draws in total, is faster with bounds.
    pub(crate) fn is_faster(&self, head: &Head<'_>, rows: usize, draws: usize) -> bool {
        draws <= MAX_DRAWS && self.kernel(head, rows).is_some()
    }

    /// The memory of a worker for calls of up to `max_rows` rows.
    pub(crate) fn memory(&self, head: &Head<'_>, max_rows: usize) -> BoundsMemory {
        let rows = max_rows.min(MAX_ROWS);
        let has_amx = self.kernels[1].is_some();
        BoundsMemory {
            logits: rows * TILE,
            weight_row: head.weight().dtype().bytes(head.hidden()).unwrap_or(0),
            codes: if has_amx && head.shadow().is_none() { slab_bytes(head.hidden()) } else { 0 },
            #[cfg(target_arch = "x86_64")]
            integers: if has_amx && head.shadow().is_some() { 2 * rows * TILE } else { 0 },
        }
    }

    /// The layout of the digits for a kernel.
    fn layout(&self, head: &Head<'_>, kernel: Kernel) -> DigitLayout {
        macro_rules! layout {
            ($format:ident) => {{
                #[cfg(target_arch = "x86_64")]
                let layout = vnni::layout::<$format>();
                #[cfg(target_arch = "aarch64")]
                let layout = <$format as dotprod::Codes>::DIGITS;
                layout
            }};
        }
        match kernel {
            #[cfg(target_arch = "aarch64")]
            Kernel::Dotprod => crate::dot::blocks::for_format!(head.weight().dtype(), layout, DigitLayout::Groups),
            #[cfg(target_arch = "x86_64")]
            Kernel::Vnni => crate::dot::blocks::for_format!(head.weight().dtype(), layout, DigitLayout::Groups),
            #[cfg(target_arch = "x86_64")]
            Kernel::Amx if head.shadow().is_some() => DigitLayout::Panels,
            #[cfg(target_arch = "x86_64")]
            Kernel::Amx => DigitLayout::PanelsAndSums,
            _ => DigitLayout::Groups,
        }
    }

    /// Creates the memory for up to `max_rows` hidden states in digits.
    pub(crate) fn digits(&self, max_rows: usize, head: &Head<'_>) -> Digits {
        let layouts = self.kernels.iter().flatten().map(|&kernel| self.layout(head, kernel)).collect();
        Digits::new(max_rows, head.hidden(), layouts)
    }

    /// Packs hidden states as digits. Returns false if the call is faster without bounds, or a row has no bounds.
    pub(crate) fn pack(&self, head: &Head<'_>, hidden: &Matrix<'_>, digits: &mut Digits) -> bool {
        let Some(kernel) = self.kernel(head, hidden.rows()) else { return false };
        self.pack_for(kernel, head, hidden, digits)
    }

    /// Packs hidden states for a kernel. Returns false if a row has no bounds.
    fn pack_for(&self, kernel: Kernel, head: &Head<'_>, hidden: &Matrix<'_>, digits: &mut Digits) -> bool {
        let layout = self.layout(head, kernel);
        let coarsest = if layout.skips_zeros() { self.coarsest } else { 0.0 };
        let new = if head.shadow().is_some() { ShadowBound::new } else { ShadowBound::of_blocks };
        digits.pack(layout, hidden, coarsest, |norm, error| new(self.terms, norm, error, self.largest_norm))
    }

    /// Writes to `out[r * TILE + i]` an upper bound of the dot product of row `i` of the weight's rows `rows` (at most
    /// [`TILE`]) and row `r` of `hidden`.
    pub(crate) fn tile(
        &self,
        head: &Head<'_>,
        rows: Range<usize>,
        hidden: &Digits,
        out: &mut [f32],
        scratch: &mut DotScratch,
    ) {
        let count = rows.len();
        assert!(count <= TILE && out.len() >= hidden.rows.len().saturating_sub(1) * TILE + count);
        let weight = head.weight().row_range(rows.clone());
        let [scales, errors, norms] = match head.shadow() {
            Some(shadow) => {
                let shadow = shadow.row_range(rows);
                self.multiply_shadow(&shadow, hidden, out, scratch);
                [shadow.scales(), shadow.errors(), shadow.norms()]
            }
            None => {
                multiply_blocks(&weight, hidden, out, scratch);
                let [norms, magnitudes] = self.norms.each_ref().map(|norms| &norms[rows.clone()]);
                [&ONES[..count], norms, magnitudes]
            }
        };
        #[cfg(target_arch = "x86_64")]
        if self.kernels.contains(&Some(Kernel::Vnni)) || self.kernels.contains(&Some(Kernel::Amx)) {
            // SAFETY: `kernels` detected AVX-512.
            return unsafe { add_bounds_avx512(hidden, [scales, errors, norms], out) };
        }
        add_bounds(hidden, [scales, errors, norms], out);
    }

    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    fn multiply_shadow(&self, shadow: &Shadow<'_>, hidden: &Digits, out: &mut [f32], scratch: &mut DotScratch) {
        let (codes, stride, rows) = (shadow.codes().as_ptr().cast::<u8>(), code_stride(shadow.cols()), shadow.rows());
        #[cfg(target_arch = "x86_64")]
        if hidden.layout() == DigitLayout::Panels {
            // SAFETY: a code is one byte, so the memory has as many bytes as codes.
            let codes = unsafe { core::slice::from_raw_parts(codes, shadow.codes().len()) };
            return multiply_panels(codes, stride, hidden, out, scratch, |codes, digits, out, scratch| {
                // SAFETY: `kernels` detected AMX-INT8. A row of codes has as many pairs of bytes as a column of the
                // panels, and `out` has a row for each column.
                unsafe { crate::dot::amx::integer_tile(codes, digits, out, scratch) }
            });
        }
        // SAFETY (every block below): `kernels` detected the instructions. The shadow has `rows` rows of whole groups,
        // with `stride` bytes each. The hidden rows are as long, and `tile` has checked the size of `out`.
        match self.kernels[0] {
            #[cfg(target_arch = "x86_64")]
            Some(Kernel::Vnni) => {
                let operands =
                    vnni::Operands { codes, stride, rows, hidden, groups: stride / 64, out: out.as_mut_ptr() };
                // SAFETY: as above.
                unsafe { operands.multiply::<codes::ShadowCodes>() }
            }
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Some(Kernel::Avx2) => unsafe { avx2::multiply(shadow, hidden, out) },
            #[cfg(target_arch = "aarch64")]
            Some(Kernel::Dotprod) => {
                // SAFETY: as above.
                unsafe { dotprod::multiply::<dotprod::ShadowCodes>((codes, stride), [rows, stride], hidden, out) }
            }
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Some(Kernel::Neon) => unsafe { plain::neon(shadow, hidden, out) },
            _ => plain::portable(shadow, hidden, out),
        }
    }
}

/// Multiplies the products in `out` by their scales, and adds the bounds of their errors.
///
/// `scales`, `errors` and `norms` have one value per token of the tile.
#[inline(always)]
fn add_bounds(hidden: &Digits, [scales, errors, norms]: [&[f32]; 3], out: &mut [f32]) {
    for (row, out) in hidden.rows.iter().zip(out.chunks_mut(TILE)) {
        for (out, ((scale, error), norm)) in out.iter_mut().zip(scales.iter().zip(errors).zip(norms)) {
            *out = *out * (scale * row.scale) + row.bound.of(*error, *norm);
        }
    }
}

/// [`add_bounds`], compiled for AVX-512.
///
/// Without AVX-512, [`add_bounds`] takes 4% of a call of 16 rows (`Q8_0` on 16 cores with AMX).
///
/// # Safety
/// AVX-512 F is available.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn add_bounds_avx512(hidden: &Digits, of_tokens: [&[f32]; 3], out: &mut [f32]) {
    add_bounds(hidden, of_tokens, out);
}

#[cfg(target_arch = "x86_64")]
fn multiply_blocks(weight: &Matrix<'_>, hidden: &Digits, out: &mut [f32], scratch: &mut DotScratch) {
    let (codes, stride, rows) = (weight.bytes().as_ptr(), weight.row_stride_bytes(), weight.rows());
    let operands = vnni::Operands { codes, stride, rows, hidden, groups: weight.cols() / 64, out: out.as_mut_ptr() };
    macro_rules! multiply {
        ($format:ident) => {
            // SAFETY: `kernels` detected the instructions, and checked that a row has whole units. `tile` has checked
            // the size of `out`. Digits are in panels only if `kernels` detected AMX-INT8 and a stride below 2^27
            // bytes.
            unsafe {
                match hidden.layout() {
                    DigitLayout::PanelsAndSums => {
                        reserve(&mut scratch.decoded, slab_bytes(weight.cols()) / 4);
                        operands.multiply_slabs::<$format>(&mut scratch.decoded)
                    }
                    _ => operands.multiply::<$format>(),
                }
            }
        };
    }
    crate::dot::blocks::for_format!(weight.dtype(), multiply, unreachable!("a type without blocks"));
}

#[cfg(target_arch = "aarch64")]
fn multiply_blocks(weight: &Matrix<'_>, hidden: &Digits, out: &mut [f32], _: &mut DotScratch) {
    let (codes, size) = ((weight.bytes().as_ptr(), weight.row_stride_bytes()), [weight.rows(), weight.cols()]);
    macro_rules! multiply {
        ($format:ident) => {
            // SAFETY: `kernels` detected the instructions, and `tile` has checked the size of `out`.
            unsafe { dotprod::multiply::<$format>(codes, size, hidden, out) }
        };
    }
    crate::dot::blocks::for_format!(weight.dtype(), multiply, unreachable!("a type without blocks"));
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn multiply_blocks(_: &Matrix<'_>, _: &Digits, _: &mut [f32], _: &mut DotScratch) {
    unreachable!("quantised weights have bounds only with VNNI, AMX or the dot products of ARM");
}
