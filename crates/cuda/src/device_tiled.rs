//! The fused tiled variant over device memory (paper Alg. 1).
#![allow(unsafe_code)]

use crate::abi::{Call, HeadTransform, Maps, TensorMap};
use crate::device::Device;
use crate::error::CudaError;
use crate::fused_hopper::{Loaded, MAX_ROWS, Tile};
use crate::tensor_map;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, result};
use flash_sampling_core::{DType, Knob};
use std::sync::Arc;

/// The most tokens of a head: beyond it the kernel's 32-bit shares overflow.
const MAX_TOKENS: usize = 1 << 26;

/// A row-major matrix `[rows, cols]` in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMatrix {
    /// Device address; a multiple of 16.
    pub address: u64,
    /// Element type: bf16 or f16.
    pub dtype: DType,
    /// Number of rows.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
    /// Elements from one row to the next; a multiple of 8.
    pub row_stride: usize,
}

impl DeviceMatrix {
    fn check(&self, what: &'static str) -> Result<(), CudaError> {
        let reason = match () {
            () if self.dtype == DType::F32 => "the tensor cores take bf16 and f16",
            () if !self.address.is_multiple_of(16) => "its address is not a multiple of 16 bytes",
            () if !self.row_stride.is_multiple_of(8) => "its row stride is not a multiple of 8 elements",
            () if self.cols == 0 => "it has no columns",
            () if self.row_stride < self.cols => "the stride is smaller than a row",
            () => return Ok(()),
        };
        Err(CudaError::Layout { what, reason })
    }
}

/// An LM head in device memory: `logits = scale * soft_cap(hidden x weight^T + bias)`.
#[derive(Clone, Copy, Debug)]
pub struct DeviceHead {
    /// `[tokens, hidden]`: the rows that can be drawn, without padding.
    pub weight: DeviceMatrix,
    /// Global id of the weight's first row.
    pub first_token: u32,
    /// Device address of one float32 per weight row, added before soft-cap and scale.
    pub bias: Option<u64>,
    /// `cap * tanh(l / cap)`; finite and positive.
    pub soft_cap: Option<f32>,
    /// Multiplies the logits; finite and positive.
    pub scale: f32,
}

/// The fused tiled variant over device memory: one launch a call, on the caller's stream. A call allocates nothing and
/// waits for nothing, so it can be captured into a graph; positions are read from device memory when the kernel runs.
#[derive(Debug)]
pub struct DeviceTiled {
    device: Arc<Device>,
    head: DeviceHead,
    kernels: Vec<Arc<Loaded>>,
    weight: TensorMap,
    granule: TensorMap,
    /// Ordered bits of the best winner a row, the first invalid logit a row, a counter, and a logit a block and row.
    scratch: u64,
    /// What `scratch` is the address of.
    _scratch: CudaSlice<u8>,
    max_rows: usize,
}

const BEST: u64 = 0;
const INVALID: u64 = BEST + 8 * MAX_ROWS as u64;
const ARRIVED: u64 = INVALID + 8 * MAX_ROWS as u64;
const LOGITS: u64 = ARRIVED + 256;

impl DeviceTiled {
    /// Plans for calls of up to `max_rows` rows, 256 at most: compiles and loads the kernels, allocates the scratch.
    ///
    /// # Errors
    /// * [`CudaError::Architecture`]: the device is no Hopper.
    /// * [`CudaError::Layout`]: the weight's type, address or stride.
    /// * [`CudaError::TooLarge`]: tokens, columns or rows.
    /// * [`CudaError::EmptyPlan`]: `max_rows` is 0.
    /// * [`CudaError::Compile`], [`CudaError::Driver`].
    ///
    /// # Safety
    /// The head's weight and bias are device memory of this device, of the stated sizes, and stay so and unchanged
    /// while this value is used and until all its launches have run.
    pub unsafe fn new(head: DeviceHead, max_rows: usize, device: &Arc<Device>) -> Result<Self, CudaError> {
        let (major, minor) = device.capability();
        if (major, minor) != (9, 0) {
            return Err(CudaError::Architecture { major, minor });
        }
        head.weight.check("weight")?;
        if max_rows == 0 {
            return Err(CudaError::EmptyPlan { knob: Knob::MaxRows });
        }
        let limits = [
            ("rows", max_rows, MAX_ROWS),
            ("tokens", head.weight.rows, MAX_TOKENS),
            ("columns", head.weight.cols, i32::MAX as usize),
        ];
        if let Some(&(what, found, limit)) = limits.iter().find(|(_, found, limit)| found > limit) {
            return Err(CudaError::TooLarge { what, found, limit });
        }
        let tiles = Tile::up_to(max_rows, head.weight.dtype);
        let kernels = tiles.map(|tile| device.kernel(tile)).collect::<Result<Vec<_>, _>>()?;
        let allocate = CudaError::driver("allocate scratch");
        let size = LOGITS as usize + 4 * device.multiprocessors() as usize * max_rows;
        let stream = device.stream()?;
        let scratch = stream.alloc_zeros::<u8>(size).map_err(&allocate)?;
        let base = scratch.device_ptr(&stream).0;
        // SAFETY: the scratch holds the invalid keys there.
        unsafe { result::memset_d8_async(base + INVALID, 0xff, 8 * MAX_ROWS, stream.cu_stream()) }
            .map_err(&allocate)?;
        stream.synchronize().map_err(&allocate)?;
        let weight = tensor_map::encode(&head.weight, 64)?;
        let granule = tensor_map::encode(&head.weight, 16)?;
        let device = device.clone();
        Ok(DeviceTiled { device, head, kernels, weight, granule, scratch: base, _scratch: scratch, max_rows })
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Bytes of device memory that the plan holds besides the kernels.
    pub fn scratch_bytes(&self) -> usize {
        self._scratch.len()
    }

    /// Draws for `hidden [rows, hidden]`: enqueues one launch on `stream` and returns.
    ///
    /// `rows` is the device address of one [`abi::Row`](crate::abi::Row) a row, `draws` of room for one
    /// [`abi::Draw`](crate::abi::Draw) a row.
    ///
    /// # Errors
    /// * [`CudaError::Layout`]: the hidden states' type, width, address or stride.
    /// * [`CudaError::TooLarge`]: more rows than planned.
    /// * [`CudaError::Driver`].
    ///
    /// # Safety
    /// * `hidden`, `rows`, `draws`, and what the rows point to, are device memory of this device, of the stated sizes,
    ///   until the launch has run.
    /// * The rows are as [`abi::Row`](crate::abi::Row) states.
    /// * Launches of one planned value follow each other: on one stream, or ordered by events.
    pub unsafe fn launch(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: u64,
        draws: u64,
    ) -> Result<(), CudaError> {
        hidden.check("hidden states")?;
        let wrong = |reason| Err(CudaError::Layout { what: "hidden states", reason });
        if hidden.dtype != self.head.weight.dtype {
            return wrong("their type is not the weight's");
        }
        if hidden.cols != self.head.weight.cols {
            return wrong("their width is not the weight's");
        }
        if hidden.rows > self.max_rows {
            return Err(CudaError::TooLarge { what: "rows", found: hidden.rows, limit: self.max_rows });
        }
        if hidden.rows == 0 {
            return Ok(());
        }
        let fitting = self.kernels.iter().find(|kernel| kernel.tile.columns as usize >= hidden.rows);
        let kernel = fitting.expect("the planned tiles reach the planned rows");
        let tokens = self.head.weight.rows as u32;
        let base = self.scratch;
        let call = Call {
            rows,
            bias: self.head.bias.unwrap_or(0),
            best: base + BEST,
            invalid: base + INVALID,
            logits: base + LOGITS,
            arrived: base + ARRIVED,
            draws,
            head: HeadTransform { soft_cap: self.head.soft_cap.unwrap_or(0.0), scale: self.head.scale },
            row_count: hidden.rows as u32,
            hidden: hidden.cols as u32,
            first_token: self.head.first_token,
            tokens,
        };
        let map = tensor_map::encode(hidden, kernel.tile.columns / kernel.tile.cluster)?;
        let maps = Maps { weight: self.weight, granule: self.granule, hidden: map };
        let blocks = kernel.blocks(tokens, self.device.multiprocessors());
        // SAFETY: head and inputs by this function's and `new`'s contract; the scratch is this value's, sized by `new`
        // for every multiprocessor, and the kernel leaves it as it found it.
        unsafe { kernel.launch(stream, blocks, &call, &maps) }
    }
}
