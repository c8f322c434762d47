//! Runs any sampler over a quantised weight with the same dot products as the head.
//!
//! A weight is a sum of digits: `w = sum_j digit_j 2^(e - bits j)`. The digits are codes of consecutive quantised
//! weights, and the hidden state of digit `j` is multiplied by `2^(-bits j)`. So all dot products are equal to the dot
//! products of the head, and a correct sampler over the quantised weight satisfies every law of the suite.

mod codes;
mod digits;

use digits::Digits;
use flash_sampling_conformance::{BuildError, SamplerFactory};
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{
    DType, Description, Head, HeadError, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples, Shape, f16,
    round_as_ggml,
};

/// Samplers of another factory, over weights of `dtype`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quantised<F> {
    inner: F,
    dtype: DType,
    /// Rows and columns of a block of scales, for types with scales.
    scale_block: [usize; 2],
    fault: Option<Fault>,
}

/// A mistake in the weight, for negative controls.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// The scales of the last row, or of its block, are doubled.
    DoubledScale,
    /// Hidden states are rounded to 8 bits, as in llama.cpp.
    RoundedHidden,
}

impl<F> Quantised<F> {
    pub(crate) const fn new(inner: F, dtype: DType) -> Self {
        Quantised { inner, dtype, scale_block: [1, usize::MAX], fault: None }
    }

    pub(crate) fn with_scale_block(self, scale_block: [usize; 2]) -> Self {
        Quantised { scale_block, ..self }
    }

    pub(crate) fn with_fault(self, fault: Fault) -> Self {
        Quantised { fault: Some(fault), ..self }
    }
}

impl<F: SamplerFactory> SamplerFactory for Quantised<F> {
    fn name(&self) -> String {
        let name = format!("{}/{}", self.inner.name(), self.dtype.name());
        match self.scale_block {
            _ if !self.dtype.is_scaled() => name,
            [1, usize::MAX] => name + "/row",
            [usize::MAX, usize::MAX] => name + "/tensor",
            [rows, cols] => format!("{name}/{rows}x{cols}"),
        }
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
        let mut weight = Weight::new(&head, &digits, self.scale_block);
        if let Some(Fault::DoubledScale) = self.fault {
            weight.double_last_scales();
        }
        let sampler = Owned::try_new(weight, |weight| {
            let head = weight.head().map_err(|error| BuildError(error.to_string()))?;
            self.inner.build(head, plan)
        })?;
        let rounds = matches!(self.fault, Some(Fault::RoundedHidden));
        Ok(Box::new(OverDigits { sampler, digits, hidden: head.hidden(), rounds, expanded: Vec::new() }))
    }
}

/// The scales of a weight, one for each block of rows and columns.
struct Scales {
    values: Vec<f32>,
    block: [usize; 2],
    /// The index of the first used row in its block. The weight begins with this number of unused rows.
    first_row: usize,
}

/// A quantised weight, and the transforms of its head.
struct Weight {
    bytes: Vec<u8>,
    scales: Option<Scales>,
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
    fn new(head: &Head<'_>, digits: &Digits, scale_block: [usize; 2]) -> Self {
        let (weight, cols) = (head.weight(), digits.cols(head.hidden()));
        let first = head.tokens().start as usize;
        let (bytes, scales) = match digits.dtype.is_scaled() {
            // A NaN or infinite scale must not affect another column.
            true if !digits.is_finite => scaled(&weight, digits, [1, digits.slots], first),
            true => scaled(&weight, digits, scale_block, first),
            false => (blocks(&weight, digits), None),
        };
        Weight {
            bytes,
            scales,
            dtype: digits.dtype,
            rows: weight.rows(),
            cols,
            first,
            vocab_size: head.vocab_size() as usize,
            bias: head.bias().map(<[f32]>::to_vec),
            soft_cap: head.soft_cap(),
            scale: head.scale(),
        }
    }

    fn head(&self) -> Result<Head<'_>, HeadError> {
        let unused = self.scales.as_ref().map_or(0, |scales| scales.first_row);
        let mut weight = Matrix::from_bytes(&self.bytes, self.dtype, unused + self.rows, self.cols, self.cols)?;
        if let Some(Scales { values, block, .. }) = &self.scales {
            weight = weight.with_scales(values, *block)?.row_range(unused..unused + self.rows);
        }
        let mut head = Head::shard(weight, self.first, self.vocab_size)?.with_scale(self.scale)?;
        if let Some(bias) = &self.bias {
            head = head.with_bias(bias)?;
        }
        if let Some(cap) = self.soft_cap {
            head = head.with_soft_cap(cap)?;
        }
        Ok(head)
    }

    /// Doubles the scales of the last row, or of its block.
    fn double_last_scales(&mut self) {
        if let Some(Scales { values, block, .. }) = &mut self.scales {
            let first = values.len() - self.cols.div_ceil(block[1]);
            return values[first..].iter_mut().for_each(|scale| *scale *= 2.0);
        }
        let row_bytes = self.cols / self.dtype.block_elements() * self.dtype.block_bytes();
        let first = self.bytes.len() - row_bytes;
        for block in self.bytes[first..].chunks_exact_mut(self.dtype.block_bytes()) {
            match self.dtype {
                DType::MXFP4 => block[0] += 1,
                _ => {
                    let at = if self.dtype == DType::Q6_K { 208 } else { 0 };
                    let factor = f16::from_le_bytes([block[at], block[at + 1]]);
                    block[at..at + 2].copy_from_slice(&f16::from_f32(2.0 * factor.to_f32()).to_le_bytes());
                }
            }
        }
    }
}

/// The blocks of a weight.
fn blocks(weight: &Matrix<'_>, digits: &Digits) -> Vec<u8> {
    let (elements, block_bytes) = (digits.dtype.block_elements(), digits.dtype.block_bytes());
    let row_bytes = digits.cols(weight.cols()) / elements * block_bytes;
    let (mut bytes, mut row) = (vec![0; weight.rows() * row_bytes], vec![0.0; weight.cols()]);
    let zeros = digits.zeros();
    for (r, bytes) in bytes.chunks_exact_mut(row_bytes).enumerate() {
        weight.row_to_f32(r, &mut row);
        for (weights, block) in row.chunks(elements / digits.slots).zip(bytes.chunks_exact_mut(block_bytes)) {
            digits.block(weights, &zeros, block);
        }
    }
    bytes
}

/// Returns the elements of a weight of a type with scales, and the scales for blocks of rows and columns.
///
/// Blocks of several rows begin at multiples of their height in the whole vocabulary, as in a checkpoint. Their scales
/// depend on their position, and on the range of the weights. So most shards have the products of the whole head.
fn scaled(weight: &Matrix<'_>, digits: &Digits, block: [usize; 2], first: usize) -> (Vec<u8>, Option<Scales>) {
    let columns = (block[1] / digits.slots).min(weight.cols());
    let [row_bytes, row_blocks] = [weight.cols() * digits.slots, weight.cols().div_ceil(columns)];
    let first_row = if block[0] == usize::MAX { 0 } else { first % block[0] };
    let rows = first_row + weight.rows();
    let mut bytes = vec![0; rows * row_bytes];
    let mut values = vec![1.0; rows.div_ceil(block[0]) * row_blocks];
    let mut row = vec![0.0; weight.cols()];
    for (r, bytes) in bytes.chunks_exact_mut(row_bytes).enumerate().skip(first_row) {
        weight.row_to_f32(r - first_row, &mut row);
        for (at, weights) in row.chunks(columns).enumerate() {
            let row_block = r / block[0];
            let unit = match block[0] {
                1 => digits.unit(weights),
                _ => digits.unit_of_all(first / block[0] + row_block, at),
            };
            values[row_block * row_blocks + at] =
                weights.iter().copied().find(|w| !w.is_finite()).unwrap_or(2f32.powi(unit));
            for (column, w) in (at * columns..).zip(weights) {
                digits.elements(column, *w, unit, &mut bytes[column * digits.slots..][..digits.slots]);
            }
        }
    }
    (bytes, Some(Scales { values, block, first_row }))
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
    /// Whether hidden states are rounded to 8 bits.
    rounds: bool,
    expanded: Vec<f32>,
}

impl PerturbedArgmax for OverDigits {
    fn description(&self) -> Description {
        let of = self.sampler.with_dependent(|_, sampler| sampler.description());
        Description { shape: Shape { input: self.hidden, ..of.shape }, ..of }
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
            if self.rounds {
                round_as_ggml(DType::Q8_0, &mut states);
            }
            for (column, h) in states.iter().enumerate() {
                let first = column * self.digits.slots;
                self.digits.expand(column, *h, &mut expanded[first..first + self.digits.slots]);
            }
        }
        let input = Matrix::new(&self.expanded, rows.len(), cols).expect("the rows were expanded");
        self.sampler.with_dependent_mut(|_, sampler| sampler.sample(input, rows, out))
    }

    fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
        self.sampler.with_dependent_mut(|_, sampler| sampler.replan(max_rows))
    }
}
