//! Products of quantised blocks and digits by AMX tiles.
//!
//! Plain version, for a slab of 16 tokens and a panel of up to 16 hidden rows, each with a column of digits:
//! ```text
//! for each span of weights with one scale, token, column:
//!     sums[token][column] += scale[token] * sum of code * high digit over the span
//! sums *= 256
//! for each span of weights with one scale, token, column:
//!     sums[token][column] += scale[token] * sum of code * low digit over the span
//!     sums[token][column] -= minimum[token] * sum of (256 * high digit + low digit) over the span
//! ```
//! Deviations:
//! 1. One product of AMX tiles computes all integers of a span: 16 tokens by the columns of the panel. Codes of `Q8_0`
//!    are loaded directly from the weight. For other types, the codes of a slab are first unpacked to bytes: 16 KiB for
//!    weight rows of 1024 elements.
//! 2. The scales of a slab are decoded once, with one token in each lane of a vector.
//! 3. A panel has 4, 8 or 16 columns, the fewest that hold the rows of the call. With 4 or 8 columns, a vector of 16
//!    integers holds several tokens. So the cost of the multiplication by scales is proportional to the columns.
//! 4. The scales of the hidden rows are so large that most high digits are zero. Tiles of 64 elements whose high digits
//!    are all zeros are skipped.
//! 5. A step multiplies two spans. The integers of a step are added to the sums some steps later, so the vector unit
//!    and the tile unit work at the same time.
//! 6. The first panel prefetches the next slab. The last slab ends with the last token, so this slab may overlap the
//!    previous slab.

use super::digits::{GROUP, Panel, columns};
use super::slab_bytes;
use super::slab_scales::{SlabFormat, Units};
use super::vnni::Operands;
use crate::dot::TILE;
use crate::dot::amx::Config;
use crate::dot::pack::Line;
use core::arch::asm;
use core::arch::x86_64::*;

/// The tokens of a slab.
const SLAB: usize = 16;
/// The bytes of the unpacked codes of a group.
const CODE_BYTES: usize = SLAB * GROUP;

/// The integers of several steps. This memory has 4 KiB, so no two integers have the same offset in a page.
#[repr(C, align(64))]
struct Integers([i32; 1024]);

/// Multiplies a tile of codes by a tile of digits, and writes the product to memory. Rows of codes begin `stride` bytes
/// apart. Rows of digits and rows of the product have `line` bytes, without gaps.
macro_rules! product {
    ($product:literal = $codes:literal, $digits:literal; $operands:expr, $line:expr) => {{
        let (codes, stride, digits, product) = $operands;
        asm!(
            concat!("tilezero tmm", $product),
            concat!("tileloadd tmm", $codes, ", [{codes} + {stride}*1]"),
            concat!("tileloadd tmm", $digits, ", [{digits} + {line}*1]"),
            concat!("tdpbssd tmm", $product, ", tmm", $codes, ", tmm", $digits),
            concat!("tilestored [{product} + {line}*1], tmm", $product),
            codes = in(reg) codes,
            stride = in(reg) stride,
            digits = in(reg) digits,
            line = in(reg) $line,
            product = in(reg) product,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
            options(nostack),
        )
    }};
}

/// A decoded slab.
struct Slab {
    /// The address of the first token's blocks.
    first: *const u8,
    /// The unpacked codes, unless tiles are loaded directly from the blocks.
    codes: *const u8,
    scales: *const f32,
    /// The index of the first token among the rows of [`Operands::codes`].
    at: usize,
    /// The number of tokens.
    count: usize,
}

/// The token of each lane, for each vector of a product.
const fn tokens_of_lanes<const COLUMNS: usize>() -> [[i32; 16]; COLUMNS] {
    let mut out = [[0; 16]; COLUMNS];
    let mut i = 0;
    while i < 16 * COLUMNS {
        out[i / 16][i % 16] = (i / COLUMNS) as i32;
        i += 1;
    }
    out
}

/// Returns the factor of each lane's token, from the factors of 16 tokens.
///
/// # Safety
/// AVX-512 F is available, and 16 floats are readable.
#[inline(always)]
unsafe fn factors<const COLUMNS: usize>(of_tokens: *const f32, vector: usize) -> __m512 {
    // SAFETY: by this function's contract.
    unsafe {
        if COLUMNS == 16 {
            return _mm512_set1_ps(*of_tokens.add(vector));
        }
        let index = const { tokens_of_lanes::<COLUMNS>() }[vector];
        _mm512_permutexvar_ps(_mm512_loadu_si512(index.as_ptr().cast()), _mm512_loadu_ps(of_tokens))
    }
}

impl Operands<'_> {
    /// Writes to `out[r * TILE + i]` the product of row `i` of the codes and the digits of hidden row `r`.
    ///
    /// # Safety
    /// AMX-INT8, AVX-512 F, BW, DQ and VL are available. The codes are of `T`, in whole units, with a stride below 2^27
    /// bytes. The hidden rows are in [`PanelsAndSums`](super::digits::DigitLayout::PanelsAndSums), and have as many
    /// groups. `out` has [`TILE`] floats per hidden row.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(super) unsafe fn multiply_slabs<T: SlabFormat>(&self, memory: &mut [Line]) {
        // SAFETY: by this function's contract.
        unsafe {
            match columns(self.hidden.rows.len()) {
                4 => self.slabs::<T, 4>(memory),
                8 => self.slabs::<T, 8>(memory),
                _ => self.slabs::<T, 16>(memory),
            }
        }
    }

    /// # Safety
    /// As for [`Operands::multiply_slabs`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn slabs<T: SlabFormat, const COLUMNS: usize>(&self, memory: &mut [Line]) {
        let (rows, count) = (self.hidden.rows.len(), self.rows.min(SLAB));
        if count == 0 || rows == 0 {
            return; // An empty shard has a tile without rows.
        }
        assert!(memory.len() * 64 >= slab_bytes(64 * self.groups));
        let (codes, scales) = memory.split_at_mut(self.groups * CODE_BYTES / 64);
        let (codes, scales) = (codes.as_mut_ptr().cast::<u8>(), scales.as_mut_ptr().cast::<f32>());
        let mut integers = Integers([0; 1024]);
        let offset = |token: usize| token.min(count - 1) * self.stride;
        // SAFETY: by this function's contract. `count` tokens exist from `at` on; the last token replaces missing
        // tokens.
        unsafe {
            // Tile registers 0 and 1 hold integers, 2 and 3 codes, 4 and 5 digits.
            let (bytes, span, tokens) = (4 * COLUMNS as u16, T::SPAN as u16, count as u8);
            let rows_of_digits = (T::SPAN / 4) as u8;
            let config = Config::new(
                [bytes, bytes, span, span, bytes, bytes, 0, 0],
                [tokens, tokens, tokens, tokens, rows_of_digits, rows_of_digits, 0, 0],
            );
            asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly));
            let mut offsets = [0i32; SLAB];
            (0..SLAB).for_each(|token| offsets[token] = offset(token) as i32);
            let offsets = _mm512_loadu_si512(offsets.as_ptr().cast());
            for start in (0..self.rows).step_by(SLAB) {
                let at = start.min(self.rows - count);
                let first = self.codes.add(at * self.stride);
                for unit in 0..self.groups / T::GROUPS {
                    let from = first.add(unit * T::UNIT_BYTES);
                    Units { first: from, offsets }.write_scales::<T>(scales.add(unit * T::VECTORS * 16));
                    if T::IN_PLACE {
                        continue;
                    }
                    for token in 0..SLAB {
                        for group in 0..T::GROUPS {
                            let codes_of_unit = T::codes(from.add(offset(token)), group);
                            let signed = _mm512_sub_epi8(codes_of_unit, _mm512_set1_epi8(T::OFFSET as i8));
                            let to = codes.add((unit * T::GROUPS + group) * CODE_BYTES + token * 64);
                            _mm512_storeu_si512(to.cast(), signed);
                        }
                    }
                }
                let slab = Slab { first, codes, scales, at, count };
                for panel in 0..rows.div_ceil(16) {
                    self.slab_panel::<T, COLUMNS>(&slab, panel, &mut integers);
                }
            }
            asm!("tilerelease", options(nostack, nomem));
        }
    }

    /// Multiplies a slab by a panel of hidden rows.
    ///
    /// # Safety
    /// As for [`Operands::multiply_slabs`]; the slab and the panel exist, and the tiles are configured.
    #[inline(always)]
    unsafe fn slab_panel<T: SlabFormat, const COLUMNS: usize>(
        &self,
        slab: &Slab,
        panel: usize,
        integers: &mut Integers,
    ) {
        let Panel { digits, sums: digit_sums, tiles } = self.hidden.panel(panel);
        let (digits, digit_sums) = (digits.as_ptr(), digit_sums.as_ptr().cast::<f32>());
        let integers = integers.0.as_mut_ptr();
        // The integers of a step are added `lag` steps later. The memory has room for the integers of `2 * lag` steps.
        let (lag, size, steps_of_tile) = (16 / COLUMNS, SLAB * COLUMNS, GROUP / (2 * T::SPAN));
        let (steps, first_low) = (tiles.len() * steps_of_tile, (tiles.len() - self.groups) * steps_of_tile);
        // The tile of a step, and its first span among all spans of a row.
        let place = |step: usize| {
            let tile = tiles[step / steps_of_tile] as usize;
            let group = if step < first_low { tile - self.groups } else { tile };
            (tile, (group * steps_of_tile + step % steps_of_tile) * 2)
        };
        // SAFETY: by this function's contract; the integers of a span have no gaps.
        unsafe {
            let mut sums = [_mm512_setzero_ps(); COLUMNS];
            for step in 0..steps + lag {
                if step < steps {
                    let (tile, first_span) = place(step);
                    let operands = |i: usize| {
                        let span = first_span + i;
                        let (group, k) = (span * T::SPAN / GROUP, span * T::SPAN % GROUP);
                        let (from, stride) = if T::IN_PLACE {
                            (slab.first.add(span * T::UNIT_BYTES / 2 + 2), self.stride)
                        } else {
                            (slab.codes.add(group * CODE_BYTES + k), 64)
                        };
                        let digits = digits.add((tile * GROUP + k) * COLUMNS);
                        (from, stride, digits, integers.add((2 * step + i) % (4 * lag) * size))
                    };
                    product!("0" = "2", "4"; operands(0), 4 * COLUMNS);
                    product!("1" = "3", "5"; operands(1), 4 * COLUMNS);
                    if panel == 0 && step >= first_low && step % steps_of_tile == 0 {
                        let group = first_span * T::SPAN / GROUP;
                        let next = slab.first.wrapping_add(SLAB * self.stride + group * T::UNIT_BYTES / T::GROUPS);
                        for token in 0..SLAB {
                            _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(token * self.stride).cast());
                        }
                    }
                }
                let Some(earlier) = step.checked_sub(lag) else { continue };
                if earlier == first_low && first_low > 0 {
                    sums.iter_mut().for_each(|sum| *sum = _mm512_mul_ps(*sum, _mm512_set1_ps(256.0)));
                }
                let (_, first_span) = place(earlier);
                for i in 0..2 {
                    let span = first_span + i;
                    let from = integers.add((2 * earlier + i) % (4 * lag) * size);
                    let scales = slab.scales.add((span / T::SPANS * T::VECTORS + span % T::SPANS) * 16);
                    for (vector, sum) in sums.iter_mut().enumerate() {
                        let integers = _mm512_cvtepi32_ps(_mm512_loadu_si512(from.add(vector * 16).cast()));
                        *sum = _mm512_fmadd_ps(integers, factors::<COLUMNS>(scales, vector), *sum);
                    }
                    if T::HAS_MINIMA && earlier >= first_low {
                        let of_digits = _mm512_loadu_ps(digit_sums.add(span * 16));
                        for (vector, sum) in sums.iter_mut().enumerate() {
                            let minimum = factors::<COLUMNS>(scales.add(T::SPANS * 16), vector);
                            *sum = _mm512_fnmadd_ps(of_digits, minimum, *sum);
                        }
                    }
                }
            }
            let sums = transpose(sums);
            let mask = (u32::MAX >> (32 - slab.count)) as __mmask16;
            for (r, sum) in (16 * panel..self.hidden.rows.len()).zip(sums) {
                _mm512_mask_storeu_ps(self.out.add(r * TILE + slab.at), mask, sum);
            }
        }
    }
}

/// Transposes the numbers of 16 tokens, `COLUMNS` for each, to one vector of 16 tokens for each column.
///
/// # Safety
/// AVX-512 F is available.
#[inline(always)]
unsafe fn transpose<const COLUMNS: usize>(mut from: [__m512; COLUMNS]) -> [__m512; COLUMNS] {
    // In binary, the position of a number is the index of its token, followed by the index of its column. Each round
    // moves the lowest bit of every position to the top.
    for _ in 0..COLUMNS.ilog2() {
        let mut to = from;
        for i in 0..COLUMNS / 2 {
            // SAFETY: by this function's contract.
            unsafe {
                let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
                let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
                to[i] = _mm512_permutex2var_ps(from[2 * i], even, from[2 * i + 1]);
                to[COLUMNS / 2 + i] = _mm512_permutex2var_ps(from[2 * i], odd, from[2 * i + 1]);
            }
        }
        from = to;
    }
    from
}
