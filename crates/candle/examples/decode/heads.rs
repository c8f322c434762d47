//! Contenders for the step from hidden states to tokens, at temperature 1 and without filters.
#![allow(unsafe_code)]

use candle_core::{D, DType, Error, Result, Tensor};
use candle_nn::sampling::gumbel_softmax;
use candle_transformers::generation::{LogitsProcessor, Sampling};
use flash_sampling::{CpuOptions, PerturbedArgmax, Plan, RowParams, Samples, cpu};
use flash_sampling_candle::{FusedHead, HeadOptions, with_matrix};

/// The names of the contenders, by number.
pub(crate) const NAMES: [&str; 5] = [
    "our fused head",
    "candle's matmul, LogitsProcessor",
    "candle's matmul, gumbel_softmax",
    "candle's matmul, our sampler of logits",
    "our fused head, weight kept in bf16",
];
/// The number of the baseline.
pub(crate) const RIVAL: usize = 1;
/// The number of the head whose weight stays bf16. It differs from head 0 only if the model is not in bf16.
pub(crate) const KEPT: usize = 4;

/// A contender, planned for a number of sequences.
pub(crate) struct Head {
    rows: Vec<RowParams<'static>>,
    samples: Samples,
    kind: HeadKind,
}

enum HeadKind {
    Fused(Box<FusedHead>),
    Processor(Tensor, Vec<LogitsProcessor>),
    Gumbel(Tensor),
    Standalone(Tensor, Box<Standalone>),
}

/// Our sampler of logits, on the device of the logits.
enum Standalone {
    Cpu(cpu::Standalone),
    #[cfg(feature = "cuda")]
    Gpu(gpu::Standalone),
}

impl Head {
    /// The contender with number `kind`, for a weight `[vocab, hidden]`.
    pub(crate) fn new(kind: usize, weight: &Tensor, sequences: usize) -> Result<Head> {
        let plan = Plan { max_rows: sequences, ..Plan::default() };
        let transposed = weight.t()?;
        let kind = match kind {
            0 | KEPT => {
                let weight = if kind == KEPT { weight.to_dtype(DType::BF16)? } else { weight.clone() };
                let head = FusedHead::new(weight, HeadOptions::default(), plan, &CpuOptions::default())?;
                HeadKind::Fused(Box::new(head))
            }
            1 => {
                let all = Sampling::All { temperature: 1.0 };
                let processor = |seed| LogitsProcessor::from_sampling(seed, all.clone());
                HeadKind::Processor(transposed, (0..sequences as u64).map(processor).collect())
            }
            2 => HeadKind::Gumbel(transposed),
            _ => {
                #[cfg(feature = "cuda")]
                if weight.device().is_cuda() {
                    let sampler = gpu::Standalone::new(weight, sequences)?;
                    return Ok(Head::of(
                        sequences,
                        HeadKind::Standalone(transposed, Box::new(Standalone::Gpu(sampler))),
                    ));
                }
                let sampler =
                    cpu::Standalone::new(weight.dim(0)?, plan, &CpuOptions::default()).map_err(Error::wrap)?;
                HeadKind::Standalone(transposed, Box::new(Standalone::Cpu(sampler)))
            }
        };
        Ok(Head::of(sequences, kind))
    }

    fn of(sequences: usize, kind: HeadKind) -> Head {
        let row = |seed| RowParams { seed, ..RowParams::default() };
        Head { rows: (0..sequences as u64).map(row).collect(), samples: Samples::new(), kind }
    }

    /// The next token of each sequence, for hidden states `[sequences, hidden]`.
    pub(crate) fn next(&mut self, hidden: &Tensor, position: u64) -> Result<Vec<u32>> {
        self.rows.iter_mut().for_each(|row| row.position = position);
        match &mut self.kind {
            HeadKind::Fused(head) => head.sample(hidden, &self.rows, &mut self.samples)?,
            HeadKind::Processor(weight, processors) => {
                let logits = hidden.matmul(weight)?;
                let draw = |(row, processor): (usize, &mut LogitsProcessor)| processor.sample(&logits.get(row)?);
                return processors.iter_mut().enumerate().map(draw).collect();
            }
            HeadKind::Gumbel(weight) => return gumbel_softmax(&hidden.matmul(weight)?, 1.0, D::Minus1)?.to_vec1(),
            HeadKind::Standalone(weight, sampler) => {
                let logits = hidden.matmul(weight)?;
                match &mut **sampler {
                    Standalone::Cpu(sampler) => with_matrix(&logits, |logits| {
                        sampler.sample(logits, &self.rows, &mut self.samples).map_err(Error::wrap)
                    })?,
                    #[cfg(feature = "cuda")]
                    Standalone::Gpu(sampler) => return sampler.next(&logits, &self.rows),
                }
            }
        }
        self.samples.iter().map(|row| Ok(row.map_err(Error::wrap)?.token())).collect()
    }
}

#[cfg(feature = "cuda")]
mod gpu {
    use candle_core::cuda_backend::cudarc::driver::CudaSlice;
    use candle_core::{DeviceLocation, Error, Result, Tensor, bail};
    use flash_sampling::RowParams;
    use flash_sampling::cuda::{Device, DeviceAddress, DeviceDraws, DeviceStandalone, abi};
    use flash_sampling_candle::with_device_matrix;

    /// The sampler of logits in device memory, with memory for its draws.
    pub(crate) struct Standalone {
        sampler: DeviceStandalone,
        draws: CudaSlice<abi::Draw>,
    }

    impl Standalone {
        pub(crate) fn new(weight: &Tensor, sequences: usize) -> Result<Self> {
            let DeviceLocation::Cuda { gpu_id } = weight.device().location() else {
                bail!("the weight is not on a GPU")
            };
            let device = Device::new(gpu_id).map_err(Error::wrap)?;
            with_device_matrix(weight, |stream, weight| {
                let tokens = 0..weight.rows as u32;
                let sampler = DeviceStandalone::new(tokens, weight.dtype, sequences, &device).map_err(Error::wrap)?;
                Ok(Standalone { sampler, draws: stream.alloc_zeros(sequences).map_err(Error::wrap)? })
            })
        }

        pub(crate) fn next(&mut self, logits: &Tensor, rows: &[RowParams<'_>]) -> Result<Vec<u32>> {
            with_device_matrix(logits, |stream, logits| {
                let row = |r: &RowParams<'_>| abi::Row {
                    seed: r.seed,
                    position: r.position,
                    inv_temperature: 1.0,
                    ..abi::Row::default()
                };
                let there = stream.clone_htod(&rows.iter().map(row).collect::<Vec<_>>()).map_err(Error::wrap)?;
                let places = DeviceDraws {
                    count: rows.len(),
                    rows: DeviceAddress::of(&there, stream),
                    sources: None,
                    draws: DeviceAddress::of(&self.draws, stream),
                    log_z: None,
                };
                // SAFETY: logits, rows and draws are device memory of this device and of these sizes; the code below
                // waits for the stream.
                unsafe { self.sampler.launch(stream, &logits, &places) }.map_err(Error::wrap)?;
                let draws = stream.clone_dtoh(&self.draws).map_err(Error::wrap)?;
                stream.synchronize().map_err(Error::wrap)?;
                if let Some(draw) = draws.iter().find(|draw| draw.status != abi::status::DRAWN) {
                    bail!("a row was not drawn: {draw:?}");
                }
                Ok(draws.iter().map(|draw| draw.token).collect())
            })
        }
    }
}
