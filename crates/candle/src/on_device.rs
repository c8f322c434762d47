//! The fused head over tensors on a GPU.
#![allow(unsafe_code)]

use crate::head::HeadOptions;
use crate::{with_device_matrix, wrap};
use candle_core::{DeviceLocation, Result, Tensor, bail};
use flash_sampling::cuda::{Device, DeviceHead, DeviceMatrix, DeviceSampler};
use flash_sampling::{Plan, RowParams, Samples};

/// A sampler over a weight that is a tensor's storage.
#[derive(Debug)]
pub(crate) struct OnDevice {
    sampler: DeviceSampler,
    /// The memory that the sampler reads.
    matrix: DeviceMatrix,
    weight: Tensor,
    _bias: Option<Tensor>,
}

impl OnDevice {
    pub(crate) fn new(weight: &Tensor, options: &HeadOptions, plan: Plan) -> Result<Self> {
        let DeviceLocation::Cuda { gpu_id } = weight.device().location() else { bail!("the weight is not on a GPU") };
        let (tokens, _) = weight.dims2()?;
        let vocab_size = options.vocab_size.unwrap_or(tokens);
        if vocab_size > tokens {
            bail!("a vocabulary of {vocab_size} tokens needs as many rows of the weight, which has {tokens}");
        }
        let bias = match &options.bias {
            Some(bias) if bias.len() != tokens => {
                bail!("a bias of {} elements for a weight of {tokens} rows", bias.len())
            }
            Some(bias) => Some(Tensor::from_slice(bias, (1, tokens), weight.device())?),
            None => None,
        };
        let bias_at =
            bias.as_ref().map(|bias| with_device_matrix(bias, |_, bias| Ok(bias.address.cast()))).transpose()?;
        let device = wrap(Device::new(gpu_id))?;
        with_device_matrix(weight, |stream, matrix| {
            let scale = options.scale.unwrap_or(1.0);
            let rows = DeviceMatrix { rows: vocab_size, ..matrix };
            let soft_cap = options.soft_cap;
            let head = DeviceHead { bias: bias_at, soft_cap, scale, ..DeviceHead::of(rows) };
            // The work that makes weight and bias is complete before another stream reads them.
            wrap(stream.synchronize())?;
            // SAFETY: both are storage of tensors that this value holds and drops after the sampler. `sample` holds the
            // lock of the weight during each call and checks that its storage did not move; no other code has the bias.
            let sampler = wrap(unsafe { DeviceSampler::new(head, vocab_size as u32, plan, &device) })?;
            Ok(OnDevice { sampler, matrix, weight: weight.clone(), _bias: bias })
        })
    }

    pub(crate) fn sample(&mut self, hidden: &Tensor, rows: &[RowParams<'_>], out: &mut Samples) -> Result<()> {
        let OnDevice { sampler, matrix: planned, weight, .. } = self;
        if !weight.device().same_device(hidden.device()) {
            bail!("the hidden states are on {:?}, the weight is on {:?}", hidden.device(), weight.device());
        }
        with_device_matrix(weight, |_, matrix| {
            if matrix != *planned {
                bail!("the weight's storage was replaced");
            }
            with_device_matrix(hidden, |stream, hidden| {
                // SAFETY: the hidden states are storage of a tensor on the weight's device, whose stream made them.
                // Both are locked for reading until the call returns, and the call waits.
                wrap(unsafe { sampler.sample(stream, &hidden, rows, out) })
            })
        })
    }
}
