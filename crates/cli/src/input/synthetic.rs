//! Deterministic heads and hidden states of any size, without a file.
//!
//! Weights are close to Gaussian with variance `1 / hidden`, so a hidden state of norm `s * sqrt(hidden)` gives logits
//! close to Gaussian with standard deviation `s`, and adding `a` times a weight row lifts that token's logit by about
//! `a`.

mod blocks;

use crate::input::Tensor;
use flash_sampling::{DType, Matrix};
use half::{bf16, f16};
use memmap2::MmapMut;
use std::io;

/// The distribution of the logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Logits {
    /// A Gaussian bulk of standard deviation 2.
    Gaussian,
    /// A Gaussian bulk and a few much larger logits, as in language models.
    Peaked,
}

/// Standard deviation of the bulk, in nats.
const BULK: f32 = 2.0;
/// The largest logit of rows 0, 1, 2, ... modulo 4, in nats. With 152k tokens the bulk has log-mass 13.9.
const PEAKS: [f32; 4] = [16.0, 14.0, 19.0, 12.0];
/// Distances of the next logits from the largest, in nats.
const BELOW: [f32; 6] = [0.0, 0.9, 1.7, 2.4, 3.3, 4.5];

/// SplitMix64's finalizer (Steele et al. 2014).
pub fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// 256 values with mean 0 and variance 1, each a sum of uniforms. A random byte selects one.
fn levels() -> [f32; 256] {
    let mut levels = [0f64; 256];
    for (i, level) in (0u64..).zip(&mut levels) {
        *level = (0..12).map(|j| mix(i * 12 + j) as f64 / 2f64.powi(64) - 0.5).sum();
    }
    let mean = levels.iter().sum::<f64>() / 256.0;
    let variance = levels.iter().map(|l| (l - mean).powi(2)).sum::<f64>() / 256.0;
    levels.map(|l| ((l - mean) / variance.sqrt()) as f32)
}

/// The little-endian bytes of a float in a float type.
fn encode(value: f32, dtype: DType) -> [u8; 4] {
    let [a, b] = match dtype {
        DType::BF16 => bf16::from_f32(value).to_le_bytes(),
        DType::F16 => f16::from_f32(value).to_le_bytes(),
        _ => return value.to_le_bytes(),
    };
    [a, b, 0, 0]
}

/// Fills rows of `cols` elements with levels; `N` is the size of an element.
fn fill<const N: usize>(bytes: &mut [u8], first_row: usize, cols: usize, seed: u64, levels: &[[u8; 4]; 256]) {
    let levels: [[u8; N]; 256] = levels.map(|level| std::array::from_fn(|i| level[i]));
    for (row, out) in bytes.chunks_exact_mut(cols * N).enumerate() {
        let key = mix(seed ^ mix((first_row + row) as u64));
        for (block, out) in (0u64..).zip(out.chunks_mut(8 * N)) {
            let picks = mix(key.wrapping_add(block)).to_le_bytes();
            for (out, pick) in out.as_chunks_mut::<N>().0.iter_mut().zip(picks) {
                *out = levels[usize::from(pick)];
            }
        }
    }
}

/// Anonymous memory, in large pages if the system has them.
fn memory(length: usize) -> io::Result<MmapMut> {
    let map = MmapMut::map_anon(length)?;
    #[cfg(target_os = "linux")]
    if let Err(error) = map.advise(memmap2::Advice::HugePage) {
        tracing::debug!("no large pages: {error}");
    }
    Ok(map)
}

/// A weight `[vocab, hidden]` of floats or blocks, filled by all processors.
pub fn weight(vocab: usize, hidden: usize, dtype: DType) -> io::Result<Tensor> {
    if dtype.is_scaled() {
        return Err(io::Error::other("a weight of 8 bits needs scales"));
    }
    let scale = 1.0 / (hidden as f32).sqrt();
    let levels = levels().map(|level| encode(level * scale, dtype));
    let row_bytes = dtype.bytes(hidden).ok_or(io::ErrorKind::OutOfMemory)?;
    let length = vocab.checked_mul(row_bytes).ok_or(io::ErrorKind::OutOfMemory)?;
    // Checked before the work: whole blocks per row.
    Matrix::from_bytes(&[], dtype, 0, hidden, hidden).map_err(io::Error::other)?;
    let mut map = memory(length)?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let rows_each = vocab.div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        for (part, bytes) in map.chunks_mut(rows_each * row_bytes).enumerate() {
            let levels = &levels;
            scope.spawn(move || match dtype.block_bytes() {
                _ if !dtype.is_float() => blocks::fill(bytes, part * rows_each, row_bytes, dtype, scale),
                2 => fill::<2>(bytes, part * rows_each, hidden, 1, levels),
                _ => fill::<4>(bytes, part * rows_each, hidden, 1, levels),
            });
        }
    });
    Tensor::from_map(map.make_read_only()?, dtype, vocab, hidden).map_err(io::Error::other)
}

/// The logits of row `r` above the bulk, in nats.
pub fn heights(r: usize) -> impl Iterator<Item = f32> {
    BELOW.into_iter().map(move |below| PEAKS[r % PEAKS.len()] - below)
}

/// The hidden state of row `r` that gives a Gaussian bulk.
pub fn bulk(r: usize, out: &mut [f32]) {
    let (key, levels) = (mix(2 ^ mix(r as u64)), levels());
    for (i, out) in (0u64..).zip(out) {
        *out = BULK * levels[(mix(key.wrapping_add(i)) & 255) as usize];
    }
}

/// Hidden states `[rows, cols]`; `make` gets the number of a row and fills it.
pub fn states(cols: usize, rows: usize, dtype: DType, mut make: impl FnMut(usize, &mut [f32])) -> io::Result<Tensor> {
    let mut map = memory(rows * cols * dtype.block_bytes())?;
    let mut row = vec![0.0; cols];
    for (r, out) in map.chunks_exact_mut(cols * dtype.block_bytes()).enumerate() {
        make(r, &mut row);
        for (out, &value) in out.chunks_exact_mut(dtype.block_bytes()).zip(&row) {
            out.copy_from_slice(&encode(value, dtype)[..dtype.block_bytes()]);
        }
    }
    Tensor::from_map(map.make_read_only()?, dtype, rows, cols).map_err(io::Error::other)
}

/// Hidden states `[rows, hidden]` for a weight of [`weight`].
pub fn hidden(weight: Matrix<'_>, rows: usize, dtype: DType, logits: Logits) -> io::Result<Tensor> {
    let mut token = vec![0.0; weight.cols()];
    states(weight.cols(), rows, dtype, |r, row| {
        bulk(r, row);
        if logits == Logits::Peaked {
            let key = mix(2 ^ mix(r as u64));
            for (i, height) in (1u64..).zip(heights(r)) {
                weight.row_to_f32((mix(key ^ mix(i)) % weight.rows() as u64) as usize, &mut token);
                row.iter_mut().zip(&token).for_each(|(h, w)| *h += height * w);
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_sampling::reference::{Reference, ReferenceVariant};
    use flash_sampling::{Head, Plan};

    fn logits(kind: Logits, dtype: DType) -> Vec<Vec<f32>> {
        let weight = weight(20_000, 256, dtype).unwrap();
        let states = if dtype.is_float() { dtype } else { DType::BF16 };
        let hidden = hidden(weight.matrix().unwrap(), 4, states, kind).unwrap();
        let reference =
            Reference::new(Head::new(weight.matrix().unwrap()).unwrap(), Plan::default(), ReferenceVariant::Tiled);
        let mut row = vec![0.0; 256];
        (0..4)
            .map(|r| {
                hidden.matrix().unwrap().row_to_f32(r, &mut row);
                reference.raw_logits(&row)
            })
            .collect()
    }

    #[test]
    fn weights_that_need_scales_are_refused() {
        for dtype in DType::ALL {
            assert_eq!(weight(3, 256, dtype).is_err(), dtype.is_scaled(), "{dtype:?}");
        }
    }

    #[test]
    fn logits_have_the_promised_spread_and_peaks() {
        // The scales of MXFP4 are powers of two, which cannot give this spread.
        for dtype in DType::ALL.into_iter().filter(|dtype| *dtype != DType::MXFP4 && !dtype.is_scaled()) {
            for row in logits(Logits::Gaussian, dtype) {
                let variance = row.iter().map(|l| l * l).sum::<f32>() / row.len() as f32;
                assert!((1.7..2.3).contains(&variance.sqrt()), "{dtype:?}: {variance}");
                assert!(row.iter().copied().fold(0.0, f32::max) < 12.0);
            }
            for (row, peak) in logits(Logits::Peaked, dtype).iter().zip(PEAKS) {
                let best = row.iter().copied().fold(0.0, f32::max);
                // The other peaks are noise of a standard deviation of about 3.5.
                assert!((best - peak).abs() < 10.0 && best > 9.0, "{dtype:?}: {best} for {peak}");
            }
        }
    }
}
