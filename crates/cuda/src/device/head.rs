//! An LM head in device memory, and its checks.

use crate::abi::{DeviceAddress, HeadTransform, WeightScales};
use crate::device::{Device, DeviceMatrix, DeviceScales, MAX_ROWS};
use crate::error::CudaError;
use cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling_core::{DType, Head, HeadError, Knob, Shadow};
use std::sync::Arc;

/// The maximum hidden size of a head with a shadow: longer rows could overflow integer sums.
const MAX_WIDTH: usize = 1 << 17;

/// The maximum number of tokens of a head: more would overflow the kernel's 32-bit shares.
const MAX_TOKENS: usize = 1 << 26;

/// An LM head in device memory: `logits = scale * soft_cap(hidden x weight^T + bias)`.
#[derive(Clone, Copy, Debug)]
pub struct DeviceHead {
    /// `[tokens, hidden]`: the rows that can be drawn, without padding.
    pub weight: DeviceMatrix,
    /// The scales of a weight of 8-bit elements; `None`: all scales are 1. Weights of other types have no scales.
    pub scales: Option<DeviceScales>,
    /// Token id of the weight's first row; no id exceeds 2^32 - 2.
    pub first_token: u32,
    /// Device address, a multiple of 4, of one float32 per weight row, added before soft-cap and scale.
    pub bias: Option<DeviceAddress<f32>>,
    /// `cap` in `cap * tanh(l / cap)`; finite and positive.
    pub soft_cap: Option<f32>,
    /// The factor of the logits; finite and positive.
    pub scale: f32,
    /// A shadow of the weight. Calls of up to 64 rows, or 96 on Hopper, read the shadow instead of the weight, and have
    /// the same draws. Rows of these calls have no filters; on Hopper, they may have filters if the first filter is a
    /// min-p or a small top-k. All other calls read the weight. Heads with a soft-cap, and weights of types other than
    /// bf16 and f16, ignore the shadow.
    pub shadow: Option<DeviceShadow>,
}

/// A [`Shadow`] of a weight in device memory, for as many tokens as the weight has rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceShadow {
    /// Device address, a multiple of 16, of the codes. Rows are
    /// [`code_stride`](flash_sampling_core::backend::code_stride) bytes apart.
    pub codes: DeviceAddress<i8>,
    /// Device address of [`Shadow::scales`].
    pub scales: DeviceAddress<f32>,
    /// Device address of [`Shadow::errors`].
    pub errors: DeviceAddress<f32>,
    /// Device address of [`Shadow::norms`].
    pub norms: DeviceAddress<f32>,
    /// The largest sum of error and norm of a token, [`DeviceShadow::largest_of`].
    pub largest: f32,
}

/// The reason why draws of a head cannot read a shadow of its weight, if there is one.
fn unsupported_by_shadow(dtype: DType, soft_cap: Option<f32>, cols: usize) -> Option<&'static str> {
    match () {
        () if !matches!(dtype, DType::BF16 | DType::F16) => Some("the weight is neither bf16 nor f16"),
        // A soft-cap is not known to grow with the logit in float32.
        () if soft_cap.is_some() => Some("the head has a soft-cap"),
        // Longer rows could overflow integer sums.
        () if cols > MAX_WIDTH => Some("the hidden size is above 2^17"),
        () => None,
    }
}

/// The device memory of a shadow. Freed on drop.
#[derive(Debug)]
pub struct ShadowMemory {
    _codes: CudaSlice<i8>,
    _numbers: [CudaSlice<f32>; 3],
}

impl DeviceShadow {
    /// Copies a shadow to device memory. It is valid after `stream` has run the copies, until the memory is dropped.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn upload(shadow: &Shadow<'_>, stream: &Arc<CudaStream>) -> Result<(Self, ShadowMemory), CudaError> {
        let failed = CudaError::driver("copy the shadow to the GPU");
        let codes = stream.clone_htod(shadow.codes()).map_err(&failed)?;
        let copy = |numbers: &[f32]| stream.clone_htod(numbers).map_err(&failed);
        let numbers = [copy(shadow.scales())?, copy(shadow.errors())?, copy(shadow.norms())?];
        let [scales, errors, norms] = numbers.each_ref().map(|numbers| DeviceAddress::of(numbers, stream));
        let (at, largest) = (DeviceAddress::of(&codes, stream), DeviceShadow::largest_of(shadow));
        let memory = ShadowMemory { _codes: codes, _numbers: numbers };
        Ok((DeviceShadow { codes: at, scales, errors, norms, largest }, memory))
    }

    /// Whether draws of a head on a device can read a shadow: from compute capability 8.0 on, for a weight of bf16 or
    /// f16 without a soft-cap.
    pub fn serves(head: &Head<'_>, device: &Device) -> bool {
        let unsupported = unsupported_by_shadow(head.weight().dtype(), head.soft_cap(), head.hidden());
        device.capability().0 >= 8 && unsupported.is_none()
    }

    /// The largest sum of error and norm of a token, rounded up.
    pub fn largest_of(shadow: &Shadow<'_>) -> f32 {
        shadow.errors().iter().zip(shadow.norms()).fold(0.0, |most, (error, norm)| most.max((error + norm).next_up()))
    }

    fn is_aligned(&self) -> bool {
        let numbers = [self.scales, self.errors, self.norms];
        self.codes.get().is_multiple_of(16) && numbers.into_iter().all(DeviceAddress::is_aligned)
    }
}

impl DeviceHead {
    /// The head of a weight whose first row is token 0, without scales, bias, transforms and shadow.
    pub fn of(weight: DeviceMatrix) -> Self {
        DeviceHead { weight, scales: None, first_token: 0, bias: None, soft_cap: None, scale: 1.0, shadow: None }
    }

    /// Checks that launches of up to `max_rows` rows can be planned.
    pub(crate) fn check(&self, max_rows: usize, device: &Device) -> Result<(), CudaError> {
        let (major, minor) = device.capability();
        if major < 8 {
            return Err(CudaError::Architecture { major, minor });
        }
        self.weight.check_weight()?;
        if self.weight.rows == 0 {
            return Err(CudaError::Layout { what: "weight", reason: "it has no rows" });
        }
        self.check_values()?;
        if max_rows == 0 {
            return Err(CudaError::EmptyPlan { knob: Knob::MaxRows });
        }
        CudaError::check_limits(&[
            ("rows", max_rows, MAX_ROWS),
            ("tokens", self.weight.rows, MAX_TOKENS),
            ("columns", self.weight.cols, i32::MAX as usize),
        ])
    }

    /// Checks factors, token ids, scales, and the bias's address. The kernels need positive factors: their pruning
    /// bound must grow with the dot product.
    fn check_values(&self) -> Result<(), CudaError> {
        for (what, value) in [("scale", Some(self.scale)), ("soft_cap", self.soft_cap)] {
            if let Some(value) = value.filter(|value| !(*value > 0.0 && value.is_finite())) {
                return Err(HeadError::Factor { what, value: value.into() }.into());
            }
        }
        let vocab_start = self.first_token as usize;
        let vocab_end = vocab_start.saturating_add(self.weight.rows);
        // The largest id marks the absence of a winner.
        if vocab_end > u32::MAX as usize - 1 {
            return Err(HeadError::Vocab { vocab_size: vocab_end, vocab_start, vocab_end }.into());
        }
        if self.bias.is_some_and(|bias| !bias.is_aligned()) {
            return Err(CudaError::Layout { what: "bias", reason: "its address is not a multiple of 4" });
        }
        if self.shadow.is_some_and(|shadow| !shadow.is_aligned()) {
            return Err(CudaError::Layout {
                what: "shadow",
                reason: "the address of its codes is not a multiple of 16, or another address is not a multiple of 4",
            });
        }
        let Some(scales) = self.scales else { return Ok(()) };
        let reason = match () {
            () if !self.weight.dtype.is_scaled() => "weights of this type have no scales",
            () if scales.block.contains(&0) => "a block has no elements",
            () if !scales.address.is_aligned() => "their address is not a multiple of 4",
            () => return Ok(()),
        };
        Err(CudaError::Layout { what: "scales", reason })
    }

    /// Checks that hidden states fit the planned head and batch. Returns whether there are any hidden states.
    pub(crate) fn check_hidden(&self, hidden: &DeviceMatrix, max_rows: usize) -> Result<bool, CudaError> {
        hidden.check("hidden states")?;
        if hidden.cols != self.weight.cols {
            return Err(CudaError::Layout {
                what: "hidden states",
                reason: "their number of columns is not that of the weight",
            });
        }
        CudaError::check_limits(&[("rows", hidden.rows, max_rows)])?;
        Ok(hidden.rows > 0)
    }

    /// The shadow, if draws of this head can read it.
    pub(crate) fn usable_shadow(&self) -> Option<DeviceShadow> {
        self.shadow.filter(|_| self.check_shadow().is_ok())
    }

    /// Checks that draws of this head can read its shadow; without a shadow, that they could read one.
    ///
    /// # Errors
    /// [`CudaError::Layout`] with the reason.
    fn check_shadow(&self) -> Result<(), CudaError> {
        let reason = match unsupported_by_shadow(self.weight.dtype, self.soft_cap, self.weight.cols) {
            Some(reason) => reason,
            None if !self.weight.is_aligned() => "the weight's address or stride is not a multiple of 16 bytes",
            None if self.shadow.is_some_and(|shadow| !(0.0..2f32.powi(100)).contains(&shadow.largest)) => {
                "the weight has numbers that are not finite, or too large"
            }
            None => return Ok(()),
        };
        Err(CudaError::Layout { what: "shadow", reason })
    }

    /// Checks that draws of this head on a device can read its shadow; without a shadow, that they could read one.
    ///
    /// # Errors
    /// [`CudaError::Layout`] with the reason.
    pub fn check_shadow_on(&self, device: &Device) -> Result<(), CudaError> {
        match device.capability() {
            (8.., _) => self.check_shadow(),
            _ => Err(CudaError::Layout { what: "shadow", reason: "the GPU has no compute capability of 8.0 or more" }),
        }
    }

    /// Whether the Hopper kernel supports the weight: its address and stride are multiples of 16 bytes, and its type is
    /// bf16, f16, or fp8 or int8 with one scale for each row.
    pub(crate) fn suits_hopper(&self) -> bool {
        self.weight.is_aligned() || self.can_scale_sums() && self.weight.unit() == 16
    }

    /// The type of hidden states that the kernels on tensor cores multiply by the weight.
    pub(crate) fn hidden_dtype(&self) -> DType {
        if self.weight.dtype.is_float() { self.weight.dtype } else { DType::BF16 }
    }

    /// Whether kernels can multiply the sums of a row by its scale, so that tensor cores multiply unscaled elements: the
    /// type is fp8 or int8, with one scale for each row.
    pub(crate) fn can_scale_sums(&self) -> bool {
        self.weight.dtype.is_scaled() && self.has_row_scales()
    }

    /// Whether all columns of a row have the same scale.
    pub(crate) fn has_row_scales(&self) -> bool {
        self.scales.is_none_or(|scales| scales.block[1] >= self.weight.cols)
    }

    /// The scales as an argument of kernels. Without scales, every scale is 1.
    pub(crate) fn weight_scales(&self) -> WeightScales {
        self.scales.map_or_else(WeightScales::default, |scales| scales.of_width(self.weight.cols))
    }

    /// The soft-cap and the scale as an argument of kernels.
    pub(crate) fn transform(&self) -> HeadTransform {
        HeadTransform { soft_cap: self.soft_cap.unwrap_or(0.0), scale: self.scale }
    }
}
