//! The LM head and the draw in one pass.

#[cfg(feature = "cuda")]
use crate::on_device::OnDevice;
use crate::{qtensor_matrix, with_matrix, wrap};
#[cfg(feature = "cuda")]
use candle_core::DeviceLocation;
use candle_core::quantized::{QMatMul, QTensor};
use candle_core::{Device, Result, Tensor, bail};
use flash_sampling::cpu::{DetachedTiled, Tiled};
use flash_sampling::{CpuOptions, Head, Matrix, PerturbedArgmax, Plan, RowParams, Samples, ShadowBuffer, make_shadow};
use std::sync::Arc;

/// The model's own transforms of its logits; the default has none.
#[derive(Clone, Debug, Default)]
pub struct HeadOptions {
    /// Tokens of the vocabulary, if the weight has more rows; the other rows are padding.
    pub vocab_size: Option<usize>,
    /// Added to the logits, one value per row of the weight.
    pub bias: Option<Vec<f32>>,
    /// `cap * tanh(l / cap)`, after the bias.
    pub soft_cap: Option<f32>,
    /// Multiplies the logits, after the cap.
    pub scale: Option<f32>,
    /// Make a [`Shadow`](flash_sampling::Shadow) of the weight: the same draws in less time, for half the memory of a bf16
    /// weight more. An error for a quantised weight, and for a weight on a GPU.
    pub shadow: bool,
}

impl HeadOptions {
    fn head<'a>(&'a self, weight: Matrix<'a>, shadow: Option<&'a ShadowBuffer>) -> Result<Head<'a>> {
        let mut head = wrap(Head::new(weight))?;
        if let Some(shadow) = shadow {
            head = wrap(head.with_shadow(shadow.shadow()))?;
        }
        if let Some(bias) = &self.bias {
            head = wrap(head.with_bias(bias))?;
        }
        if let Some(cap) = self.soft_cap {
            head = wrap(head.with_soft_cap(cap))?;
        }
        if let Some(scale) = self.scale {
            head = wrap(head.with_scale(scale))?;
        }
        match self.vocab_size {
            Some(size) => wrap(head.with_vocab_size(size)),
            None => Ok(head),
        }
    }
}

/// An LM head that draws: hidden states `[rows, hidden]` in, tokens out, without `[rows, vocab]` logits in memory.
///
/// The weight is shared with the model, and locked for reading during a call. The head copies only a weight that is not
/// row-major (the transpose of `[hidden, vocab]`). The weight of a quantised model stays quantised
/// ([`FusedHead::from_qtensor`]). On a GPU (feature `cuda`) a call launches on candle's stream, after
/// the work on the hidden states, and waits for the draws. `flash_sampling::cuda::DeviceSampler` describes knobs and
/// costs.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use flash_sampling::{CpuOptions, Plan, RowParams};
/// use flash_sampling_candle::{FusedHead, HeadOptions};
///
/// let weight = Tensor::randn(0f32, 1.0, (1000, 64), &Device::Cpu)?;
/// let plan = Plan { max_rows: 2, ..Plan::default() };
/// let mut head = FusedHead::new(weight, HeadOptions::default(), plan, &CpuOptions::default())?;
/// let hidden = Tensor::randn(0f32, 1.0, (2, 64), &Device::Cpu)?;
/// let rows = [5, 17].map(|position| RowParams { seed: 42, position, ..RowParams::default() });
/// assert_eq!(head.draw(&hidden, &rows)?.dims(), [2, 1]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct FusedHead {
    place: Place,
    vocab_size: usize,
    device: Device,
    samples: Samples,
}

/// The device of a head, with its sampler.
#[derive(Debug)]
enum Place {
    Cpu(Box<OnCpu>),
    #[cfg(feature = "cuda")]
    Gpu(Box<OnDevice>),
}

/// A sampler over a weight in main memory.
#[derive(Debug)]
struct OnCpu {
    weight: Weight,
    shadow: Option<ShadowBuffer>,
    options: HeadOptions,
    /// `None` after a call that failed midway.
    plan: Option<DetachedTiled>,
}

/// A weight in main memory, which keeps its storage alive.
#[derive(Debug)]
enum Weight {
    Plain(Tensor),
    Quantised(Arc<QTensor>),
}

impl Weight {
    fn with_matrix<R>(&self, work: impl FnOnce(Matrix<'_>) -> Result<R>) -> Result<R> {
        match self {
            Weight::Plain(tensor) => with_matrix(tensor, work),
            Weight::Quantised(tensor) => work(qtensor_matrix(tensor)?),
        }
    }
}

impl OnCpu {
    fn new(weight: Weight, options: HeadOptions, plan: Plan, cpu: &CpuOptions) -> Result<Self> {
        let (shadow, detached) = weight.with_matrix(|matrix| {
            let shadow = if options.shadow { Some(wrap(make_shadow(&matrix))?) } else { None };
            let detached = wrap(Tiled::new(options.head(matrix, shadow.as_ref())?, plan, cpu))?.detach();
            Ok((shadow, detached))
        })?;
        Ok(OnCpu { weight, shadow, options, plan: Some(detached) })
    }

    fn sample(&mut self, hidden: &Tensor, rows: &[RowParams<'_>], out: &mut Samples) -> Result<()> {
        let OnCpu { weight, shadow, options, plan } = self;
        weight.with_matrix(|matrix| {
            let head = options.head(matrix, shadow.as_ref())?;
            let Some(detached) = plan.take() else { bail!("the plan was lost by a call that failed") };
            let mut sampler = wrap(detached.attach(head))?;
            let outcome = with_matrix(hidden, |hidden| wrap(sampler.sample(hidden, rows, out)));
            *plan = Some(sampler.detach());
            outcome
        })
    }
}

impl FusedHead {
    /// Plans for a weight `[vocab, hidden]` in bf16, f16 or f32. `cpu` applies to a weight on the CPU.
    ///
    /// # Errors
    /// An invalid weight, option or plan.
    pub fn new(weight: Tensor, options: HeadOptions, plan: Plan, cpu: &CpuOptions) -> Result<Self> {
        let weight = row_major(&weight)?;
        let vocab_size = options.vocab_size.unwrap_or(weight.dim(0)?);
        let device = weight.device().clone();
        let place = match device.location() {
            #[cfg(feature = "cuda")]
            DeviceLocation::Cuda { .. } if options.shadow => bail!("a weight on a GPU has no shadow"),
            #[cfg(feature = "cuda")]
            DeviceLocation::Cuda { .. } => Place::Gpu(Box::new(OnDevice::new(&weight, &options, plan)?)),
            _ => Place::Cpu(Box::new(OnCpu::new(Weight::Plain(weight), options, plan, cpu)?)),
        };
        Ok(FusedHead { place, vocab_size, device, samples: Samples::new() })
    }

    /// Plans for a weight `[vocab, hidden]` of a quantised model on the CPU. The head reads the blocks of the tensor, and
    /// neither copies nor dequantizes them.
    ///
    /// candle's own matmul rounds hidden states to 8 bits per block. This head does not, so its logits differ from
    /// candle's, and are those of the dequantized weight. [`flash_sampling::round_as_ggml`] rounds hidden states in the
    /// same way.
    ///
    /// ```
    /// use candle_core::quantized::{GgmlDType, QTensor};
    /// use candle_core::{Device, Tensor};
    /// use flash_sampling::{CpuOptions, Plan, RowParams};
    /// use flash_sampling_candle::{FusedHead, HeadOptions};
    ///
    /// // A model has the tensor from `gguf_file::Content::tensor`.
    /// let weight = QTensor::quantize(&Tensor::randn(0f32, 1.0, (1000, 256), &Device::Cpu)?, GgmlDType::Q6K)?;
    /// let options = HeadOptions::default();
    /// let mut head = FusedHead::from_qtensor(weight.into(), options, Plan::default(), &CpuOptions::default())?;
    /// let hidden = Tensor::randn(0f32, 1.0, (1, 256), &Device::Cpu)?;
    /// assert_eq!(head.draw(&hidden, &[RowParams { seed: 42, ..RowParams::default() }])?.dims(), [1, 1]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`qtensor_matrix`], and an invalid option or plan.
    pub fn from_qtensor(weight: Arc<QTensor>, options: HeadOptions, plan: Plan, cpu: &CpuOptions) -> Result<Self> {
        let vocab_size = options.vocab_size.unwrap_or(weight.shape().dims2()?.0);
        let place = Place::Cpu(Box::new(OnCpu::new(Weight::Quantised(weight), options, plan, cpu)?));
        Ok(FusedHead { place, vocab_size, device: Device::Cpu, samples: Samples::new() })
    }

    /// As [`FusedHead::new`] or [`FusedHead::from_qtensor`], for a layer of a quantised model.
    ///
    /// # Errors
    /// As these functions.
    pub fn from_qmatmul(layer: &QMatMul, options: HeadOptions, plan: Plan, cpu: &CpuOptions) -> Result<Self> {
        match layer {
            QMatMul::Tensor(weight) | QMatMul::TensorF16(weight) => FusedHead::new(weight.clone(), options, plan, cpu),
            QMatMul::QTensor(weight) => FusedHead::from_qtensor(weight.clone(), options, plan, cpu),
        }
    }

    /// Number of tokens.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Draws for `hidden [rows, hidden]` into `out`. Hidden states that are not row-major are copied. The error of a
    /// row is its result in `out`.
    ///
    /// # Errors
    /// Hidden states of another width, type or device, or more rows than planned.
    pub fn sample(&mut self, hidden: &Tensor, rows: &[RowParams<'_>], out: &mut Samples) -> Result<()> {
        out.clear();
        let hidden = row_major(hidden)?;
        match &mut self.place {
            Place::Cpu(cpu) => cpu.sample(&hidden, rows, out),
            #[cfg(feature = "cuda")]
            Place::Gpu(gpu) => gpu.sample(&hidden, rows, out),
        }
    }

    /// Draws only tokens: u32 `[rows, draws]`, on the weight's device. All rows have the same number of draws.
    ///
    /// # Errors
    /// As [`FusedHead::sample`]; a row without a draw, by its number; rows with different numbers of draws.
    pub fn draw(&mut self, hidden: &Tensor, rows: &[RowParams<'_>]) -> Result<Tensor> {
        let draws = rows.first().map_or(1, |row| row.draws);
        if rows.iter().any(|row| row.draws != draws) {
            bail!("rows of one tensor must have the same number of draws");
        }
        let device = self.device.clone();
        let mut samples = std::mem::take(&mut self.samples);
        let sampled = self.sample(hidden, rows, &mut samples);
        let mut tokens = Vec::with_capacity(rows.len() * draws as usize);
        let collect = || -> Result<Tensor> {
            sampled?;
            for (row, outcome) in samples.iter().enumerate() {
                match outcome {
                    Ok(row) => tokens.extend(row.draws.iter().map(|draw| draw.token)),
                    Err(error) => bail!("row {row}: {error}"),
                }
            }
            Tensor::from_vec(std::mem::take(&mut tokens), (rows.len(), draws as usize), &device)
        };
        let tensor = collect();
        self.samples = samples;
        tensor
    }
}

/// The tensor itself if it is a row-major matrix, with any distance between rows; otherwise a copy. Rows of a broadcast
/// overlap, and are copied.
fn row_major(tensor: &Tensor) -> Result<Tensor> {
    match (tensor.dims(), tensor.stride()) {
        (&[rows, cols], &[row, 1]) if row >= cols || rows <= 1 => Ok(tensor.clone()),
        _ => tensor.contiguous(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::DType;

    fn tensor(rows: usize, cols: usize, salt: usize) -> Tensor {
        let values: Vec<f32> = (0..rows * cols).map(|i| ((i * 7919 + salt) % 1009) as f32 / 504.5 - 1.0).collect();
        Tensor::from_vec(values, (rows, cols), &Device::Cpu).unwrap()
    }

    fn plan() -> Plan {
        Plan { max_rows: 4, max_draws: 3, max_logprobs: Some(2), ..Plan::default() }
    }

    #[test]
    fn the_draws_are_those_of_the_sampler_on_the_same_bytes() {
        let options = HeadOptions { vocab_size: Some(490), scale: Some(0.5), ..HeadOptions::default() };
        let wide = tensor(500, 40, 3).to_dtype(DType::BF16).unwrap();
        let weight = wide.narrow(1, 4, 32).unwrap();
        let mut head = FusedHead::new(weight.clone(), options.clone(), plan(), &CpuOptions::default()).unwrap();
        let hidden = tensor(32, 4, 9).t().unwrap();
        let rows = [0, 1, 2, 3].map(|position| RowParams { seed: 7, position, draws: 3, ..RowParams::default() });
        let found = head.draw(&hidden, &rows).unwrap().to_vec2::<u32>().unwrap();
        assert_eq!(head.draw(&hidden, &rows).unwrap().to_vec2::<u32>().unwrap(), found);
        let expected = with_matrix(&weight, |matrix| {
            let mut sampler = wrap(Tiled::new(options.head(matrix, None)?, plan(), &CpuOptions::default()))?;
            let mut out = Samples::new();
            with_matrix(&hidden.contiguous()?, |hidden| wrap(sampler.sample(hidden, &rows, &mut out)))?;
            Ok(out.iter().map(|row| row.unwrap().draws.iter().map(|d| d.token).collect()).collect::<Vec<Vec<u32>>>())
        });
        assert_eq!(found, expected.unwrap());
        let with_shadow = HeadOptions { shadow: true, ..options };
        let mut head = FusedHead::new(weight, with_shadow, plan(), &CpuOptions::default()).unwrap();
        assert_eq!(head.draw(&hidden, &rows).unwrap().to_vec2::<u32>().unwrap(), found);
    }

    #[test]
    fn a_weight_by_columns_draws_what_its_copy_by_rows_does() {
        let columns = tensor(16, 300, 5);
        let weights = [columns.t().unwrap(), columns.t().unwrap().contiguous().unwrap()];
        let rows = [0, 1, 2, 3].map(|position| RowParams { position, ..RowParams::default() });
        let [found, want] = weights.map(|weight| {
            let mut head = FusedHead::new(weight, HeadOptions::default(), plan(), &CpuOptions::default()).unwrap();
            head.draw(&tensor(4, 16, 3), &rows).unwrap().to_vec2::<u32>().unwrap()
        });
        assert_eq!(found, want);
    }

    #[test]
    fn one_hidden_state_is_drawn_from_many_times() {
        let mut head =
            FusedHead::new(tensor(300, 16, 5), HeadOptions::default(), plan(), &CpuOptions::default()).unwrap();
        let rows = [0, 1, 2, 3].map(|position| RowParams { position, ..RowParams::default() });
        let many = tensor(1, 16, 3).broadcast_as((4, 16)).unwrap();
        let found = head.draw(&many, &rows).unwrap().to_vec2::<u32>().unwrap();
        let copied = many.contiguous().unwrap();
        assert_eq!(found, head.draw(&copied, &rows).unwrap().to_vec2::<u32>().unwrap());
    }

    #[test]
    fn greedy_is_candles_argmax() {
        let (weight, hidden) = (tensor(300, 16, 5), tensor(4, 16, 11));
        let logits = hidden.matmul(&weight.t().unwrap()).unwrap();
        let mut head = FusedHead::new(weight, HeadOptions::default(), plan(), &CpuOptions::default()).unwrap();
        let rows = [RowParams { temperature: 0.0, ..RowParams::default() }; 4];
        let found = head.draw(&hidden, &rows).unwrap().flatten_all().unwrap();
        assert_eq!(found.to_vec1::<u32>().unwrap(), logits.argmax(1).unwrap().to_vec1::<u32>().unwrap());
    }

    #[test]
    fn refusals_leave_the_head_usable() {
        let mut head =
            FusedHead::new(tensor(300, 16, 5), HeadOptions::default(), plan(), &CpuOptions::default()).unwrap();
        let row = RowParams::default();
        assert!(head.draw(&tensor(1, 17, 1), &[row]).is_err());
        assert!(head.draw(&tensor(5, 16, 1), &[row; 5]).is_err());
        assert!(head.draw(&tensor(1, 16, 1), &[RowParams { temperature: -1.0, ..row }]).is_err());
        assert!(head.draw(&tensor(1, 16, 1), &[row]).is_ok());
    }
}
