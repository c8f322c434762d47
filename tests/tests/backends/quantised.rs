//! Runs any sampler over a quantised weight with the same dot products as the head.
//!
//! A weight is a sum of digits: `w = sum_j digit_j 2^(e - bits j)`. The digits are codes of consecutive quantised weights,
//! and the hidden state of digit `j` is multiplied by `2^(-bits j)`. So all dot products are those of the head, and a
//! correct sampler over the quantised weight meets every law of the suite.

use flash_sampling_conformance::{BuildError, SamplerFactory};
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{
    Capabilities, DType, Head, HeadError, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples, Shape, f16,
};

/// Samplers of another factory, over weights of `dtype`: Q8_0, Q4_0, Q4_K, Q5_K or Q6_K.
#[derive(Debug)]
pub(crate) struct Quantised<F> {
    pub(crate) inner: F,
    pub(crate) dtype: DType,
}

impl<F: SamplerFactory> SamplerFactory for Quantised<F> {
    fn name(&self) -> String {
        format!("{}/{}", self.inner.name(), self.dtype.name())
    }

    fn unavailable(&self) -> Option<String> {
        self.inner.unavailable()
    }

    fn reference_variant(&self, head: &Head<'_>) -> Option<ReferenceVariant> {
        self.inner.reference_variant(head)
    }

    fn pace(&self) -> usize {
        1
    }

    fn takes_shards(&self) -> bool {
        self.inner.takes_shards()
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        let digits = Digits::new(&head, self.dtype);
        let weight = Weight::new(&head, &digits);
        let sampler = Owned::try_new(weight, |weight| {
            let head = weight.head().map_err(|error| BuildError(error.to_string()))?;
            self.inner.build(head, plan)
        })?;
        Ok(Box::new(OverDigits { sampler, digits, hidden: head.hidden(), expanded: Vec::new() }))
    }
}

/// How a float weight is split into codes.
#[derive(Clone, Copy, Debug)]
struct Digits {
    dtype: DType,
    /// Quantised weights per column of the head.
    slots: usize,
    /// Bits of a digit.
    bits: i32,
    /// All finite weights are below `2^exponent` in absolute value.
    exponent: i32,
    /// Whether all weights are finite. If they are, the last slot of a column is for infinite hidden states.
    is_finite: bool,
}

/// The least `e` with `|w| < 2^e`.
fn exponent(w: f32) -> i32 {
    if w == 0.0 { i32::MIN } else { (f64::from(w).abs().to_bits() >> 52) as i32 - 1022 }
}

impl Digits {
    fn new(head: &Head<'_>, dtype: DType) -> Self {
        let weight = head.weight();
        let mut row = vec![0.0; weight.cols()];
        let (mut largest, mut is_finite) = (i32::MIN, true);
        for r in 0..weight.rows() {
            weight.row_to_f32(r, &mut row);
            largest = row.iter().filter(|w| w.is_finite()).map(|w| exponent(*w)).fold(largest, i32::max);
            is_finite &= row.iter().all(|w| w.is_finite());
        }
        let bits = match dtype {
            DType::Q8_0 => 7,
            DType::Q5_K => 4,
            DType::Q6_K => 5,
            _ => 3,
        };
        // A NaN or infinite factor of a block must not affect another column.
        let slots = match dtype {
            _ if !is_finite => dtype.block_elements(),
            DType::Q6_K => 16,
            _ => 32,
        };
        Digits { dtype, slots, bits, exponent: if largest == i32::MIN { 0 } else { largest }, is_finite }
    }

    /// Columns of the quantised weight.
    fn cols(&self, hidden: usize) -> usize {
        (hidden * self.slots).next_multiple_of(self.dtype.block_elements())
    }

    /// Writes the hidden states of a column's slots.
    fn expand(&self, h: f32, out: &mut [f32]) {
        let last = out.len() - 1;
        for (j, out) in out.iter_mut().enumerate() {
            let shift = (self.exponent - 8 - self.bits * j as i32).max(-100);
            *out = match () {
                () if self.is_finite && (j == last || h.is_infinite()) => {
                    if j == last && h.is_infinite() {
                        h
                    } else {
                        0.0
                    }
                }
                () => h * 2f32.powi(shift),
            };
        }
    }

    /// Writes the weights of some columns as a block over `zeros`, the block of codes 0.
    fn block(&self, weights: &[f32], zeros: &[u8], block: &mut [u8]) {
        block.copy_from_slice(zeros);
        let finite = weights.iter().filter(|w| w.is_finite());
        // The scaled weights are below 2^8 in absolute value.
        let largest = finite.map(|w| exponent(*w)).fold(i32::MIN, i32::max).max(-1000) - self.exponent + 8;
        let unit = (largest - self.bits).max(-24);
        let bad = weights.iter().copied().find(|w| !w.is_finite());
        let factor = bad.map_or(f16::from_f32(2f32.powi(unit)), f16::from_f32);
        let minimum = if bad.is_none() { factor } else { f16::ZERO };
        match self.dtype {
            DType::Q6_K => block[208..210].copy_from_slice(&factor.to_le_bytes()),
            DType::Q4_K | DType::Q5_K => {
                block[..2].copy_from_slice(&factor.to_le_bytes());
                block[2..4].copy_from_slice(&minimum.to_le_bytes());
            }
            _ => block[..2].copy_from_slice(&factor.to_le_bytes()),
        }
        let run = if self.dtype == DType::Q6_K { 16 } else { 32 };
        for i in (0..self.dtype.block_elements()).step_by(run) {
            set_scale(self.dtype, block, i, self.scale(i / self.slots));
        }
        for (column, &w) in weights.iter().enumerate() {
            self.codes(w, 2f64.powi(unit + self.scale(column) as i32), |slot, code| {
                flip_code(self.dtype, block, column * self.slots + slot, 0);
                flip_code(self.dtype, block, column * self.slots + slot, code);
            });
        }
    }

    /// The binary logarithm of a column's scale. Scales differ between the columns of a block, if it has several.
    fn scale(&self, column: usize) -> usize {
        // A minimum is a scale times half the number of codes, in 6 bits.
        let scales = match self.dtype {
            DType::Q4_K => 3,
            DType::Q5_K => 2,
            _ => 7,
        };
        if self.slots == self.dtype.block_elements() { 0 } else { column % scales }
    }

    /// Calls `set` with the slot and the code of each digit of a weight that is not 0; `unit` is the first digit's unit
    /// after scaling.
    fn codes(&self, w: f32, mut unit: f64, mut set: impl FnMut(usize, i32)) {
        if !w.is_finite() {
            return (0..self.slots).for_each(|slot| set(slot, 1));
        }
        let sign = if w < 0.0 { -1 } else { 1 };
        let mut left = f64::from(w).abs() * 2f64.powi(8 - self.exponent);
        let slots = (92 / self.bits as usize + 1).min(self.slots - usize::from(self.is_finite));
        for slot in 0..slots {
            if left == 0.0 {
                break;
            }
            let digit = (left / unit) as i32;
            left -= f64::from(digit) * unit;
            unit /= f64::from(1 << self.bits);
            if digit != 0 {
                set(slot, sign * digit);
            }
        }
        assert_eq!(left, 0.0, "{w} has more digits than {:?} has slots", self.dtype);
        if self.is_finite && w != 0.0 {
            set(self.slots - 1, sign);
        }
    }
}

/// Sets the scale `2^log` of the weights from `i` on.
fn set_scale(dtype: DType, block: &mut [u8], i: usize, log: usize) {
    let scale = 1u8 << log;
    match dtype {
        DType::Q6_K => block[192 + i / 16] = scale,
        DType::Q4_K | DType::Q5_K => {
            let minimum = scale * if dtype == DType::Q4_K { 8 } else { 16 };
            let (span, bytes) = (i / 32, &mut block[4..16]);
            if span < 4 {
                bytes[span] |= scale;
                bytes[span + 4] |= minimum;
            } else {
                bytes[span + 4] |= scale & 15 | minimum << 4;
                bytes[span - 4] |= scale >> 4 << 6;
                bytes[span] |= minimum >> 4 << 6;
            }
        }
        _ => {}
    }
}

/// Flips the bits of `code` in weight `i` of a block.
fn flip_code(dtype: DType, block: &mut [u8], i: usize, code: i32) {
    let nibble = |at: usize, high: bool, code: i32| (at, (code as u8 & 15) << if high { 4 } else { 0 });
    let (at, bits) = match dtype {
        DType::Q8_0 => (2 + i, code as u8),
        DType::Q4_0 => nibble(2 + i % 16, i >= 16, code + 8),
        DType::Q4_K => nibble(16 + i / 64 * 32 + i % 32, i / 32 % 2 == 1, code + 8),
        DType::Q5_K => {
            block[16 + i % 32] ^= ((code + 16) as u8 >> 4) << (i / 32);
            nibble(48 + i / 64 * 32 + i % 32, i / 32 % 2 == 1, code + 16)
        }
        _ => {
            let (half, part) = (i / 128, i / 32 % 4);
            block[128 + half * 32 + i % 32] ^= ((code + 32) as u8 >> 4) << (2 * part);
            nibble(half * 64 + part % 2 * 32 + i % 32, part >= 2, code + 32)
        }
    };
    block[at] ^= bits;
}

/// A quantised weight, and the transforms of its head.
struct Weight {
    bytes: Vec<u8>,
    dtype: DType,
    rows: usize,
    cols: usize,
    first: usize,
    vocab_size: usize,
    bias: Option<Vec<f32>>,
    soft_cap: Option<f32>,
    scale: f32,
}

impl Weight {
    fn new(head: &Head<'_>, digits: &Digits) -> Self {
        let (weight, cols) = (head.weight(), digits.cols(head.hidden()));
        let block_bytes = digits.dtype.block_bytes();
        let mut bytes = vec![0; weight.rows() * cols / digits.dtype.block_elements() * block_bytes];
        let mut row = vec![0.0; weight.cols()];
        let columns = digits.dtype.block_elements() / digits.slots;
        let mut zeros = vec![0; block_bytes];
        (0..digits.dtype.block_elements()).for_each(|i| flip_code(digits.dtype, &mut zeros, i, 0));
        let row_bytes = cols / digits.dtype.block_elements() * block_bytes;
        for (r, bytes) in bytes.chunks_exact_mut(row_bytes).enumerate() {
            weight.row_to_f32(r, &mut row);
            for (weights, block) in row.chunks(columns).zip(bytes.chunks_exact_mut(block_bytes)) {
                digits.block(weights, &zeros, block);
            }
        }
        Weight {
            bytes,
            dtype: digits.dtype,
            rows: weight.rows(),
            cols,
            first: head.tokens().start as usize,
            vocab_size: head.vocab_size() as usize,
            bias: head.bias().map(<[f32]>::to_vec),
            soft_cap: head.soft_cap(),
            scale: head.scale(),
        }
    }

    fn head(&self) -> Result<Head<'_>, HeadError> {
        let weight = Matrix::from_bytes(&self.bytes, self.dtype, self.rows, self.cols, self.cols)?;
        let mut head = Head::shard(weight, self.first, self.vocab_size)?.with_scale(self.scale)?;
        if let Some(bias) = &self.bias {
            head = head.with_bias(bias)?;
        }
        if let Some(cap) = self.soft_cap {
            head = head.with_soft_cap(cap)?;
        }
        Ok(head)
    }
}

type Sampler<'w> = Box<dyn PerturbedArgmax + 'w>;

self_cell::self_cell!(
    struct Owned {
        owner: Weight,
        #[not_covariant]
        dependent: Sampler,
    }
);

/// A sampler over a quantised weight that takes the hidden states of the float head.
struct OverDigits {
    sampler: Owned,
    digits: Digits,
    hidden: usize,
    expanded: Vec<f32>,
}

impl PerturbedArgmax for OverDigits {
    fn capabilities(&self) -> Capabilities {
        self.sampler.with_dependent(|_, sampler| sampler.capabilities())
    }

    fn shape(&self) -> Shape {
        Shape { input: self.hidden, ..self.sampler.with_dependent(|_, sampler| sampler.shape()) }
    }

    fn plan(&self) -> Plan {
        self.sampler.with_dependent(|_, sampler| sampler.plan())
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        out.clear();
        flash_sampling_core::backend::check_call(&input, rows, &self.shape(), &self.plan())?;
        let cols = self.digits.cols(self.hidden);
        self.expanded.clear();
        self.expanded.resize(input.rows() * cols, 0.0);
        let mut states = vec![0.0; self.hidden];
        for (r, expanded) in self.expanded.chunks_exact_mut(cols).enumerate() {
            input.row_to_f32(r, &mut states);
            for (h, slots) in states.iter().zip(expanded.chunks_exact_mut(self.digits.slots)) {
                self.digits.expand(*h, slots);
            }
        }
        let input = Matrix::new(&self.expanded, rows.len(), cols).expect("the rows were expanded");
        self.sampler.with_dependent_mut(|_, sampler| sampler.sample(input, rows, out))
    }

    fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
        self.sampler.with_dependent_mut(|_, sampler| sampler.replan(max_rows))
    }
}
