//! The fused tiled variant over device memory (paper Alg. 1): what is planned, and the plain launch. Those that tell log Z, and
//! those that leave logits, stand beside.
#![allow(unsafe_code)]

mod log_z;
mod sharded_draw;
mod storing;

use crate::abi::{Call, LogitStore, Matrices};
use crate::device::alignment::check_rows;
use crate::device::fused_hopper::{FusedOutput, MAX_ROWS};
use crate::device::fused_portable::{Epilogue, LoadedPortable, MAX_BLOCKS, Portable};
use crate::device::gpu::Device;
use crate::device::head::DeviceHead;
use crate::device::hopper::Hopper;
use crate::device::matrix::DeviceMatrix;
use crate::device::row_features::{KernelChoice, RowFeatures};
use crate::device::scratch::Scratch;
use crate::error::CudaError;
use core::ops::Range;
use cudarc::driver::CudaStream;
use log_z::LogZ;
use std::sync::Arc;

/// The fused tiled variant over device memory: one launch a call, on the caller's stream. A call allocates nothing and
/// waits for nothing, so it can be captured into a graph; positions are read from device memory when the kernel runs.
///
/// Planned are the kernels for hidden states of the weight's type that lie as well aligned as the weight, and on Hopper for rows
/// of all kinds but [`RowFeatures::Any`], which [`DeviceTiled::prepare`] adds. Other hidden states, and launches that leave logits
/// or log Z, take other kernels: the first such launch loads one (and compiles it when it is in no cache), which waits for the
/// GPU and cannot be captured. Make one before.
#[derive(Debug)]
pub struct DeviceTiled {
    device: Arc<Device>,
    head: DeviceHead,
    choice: KernelChoice,
    /// Where the Hopper kernel takes the weight.
    hopper: Option<Hopper>,
    /// Those that were used or planned.
    portable: Vec<Arc<LoadedPortable>>,
    /// Ordered bits of the best winner a row, the first invalid logit a row, a counter, and a logit a block and row.
    scratch: Scratch,
    log_z: LogZ,
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
    /// * [`CudaError::Architecture`]: the device is older than compute capability 8.0.
    /// * [`CudaError::Layout`]: the weight has no rows or no columns, a stride below its width, or an address within an element; or
    ///   the bias such an address.
    /// * [`CudaError::Head`]: a scale or soft-cap that is not finite and positive, or token ids above 2^32 - 2.
    /// * [`CudaError::TooLarge`]: tokens, columns or rows.
    /// * [`CudaError::EmptyPlan`]: `max_rows` is 0.
    /// * [`CudaError::Compile`], [`CudaError::Driver`].
    ///
    /// # Safety
    /// * The head's weight and bias are device memory of this device, of the stated sizes, and stay so and unchanged
    ///   while this value is used and until all its launches have run.
    /// * This value outlives its launches and every launch of a graph that captured them. Dropping it waits for the GPU when
    ///   launches may be pending, so it is not dropped while a stream of the context captures.
    pub unsafe fn new(head: DeviceHead, max_rows: usize, device: &Arc<Device>) -> Result<Self, CudaError> {
        // SAFETY: this function's contract is the same.
        unsafe { DeviceTiled::with_kernels(head, max_rows, device, KernelChoice::default()) }
    }

    /// [`DeviceTiled::new`] with a choice of kernels.
    ///
    /// # Errors
    /// As [`DeviceTiled::new`].
    ///
    /// # Safety
    /// As [`DeviceTiled::new`].
    pub unsafe fn with_kernels(
        head: DeviceHead,
        max_rows: usize,
        device: &Arc<Device>,
        choice: KernelChoice,
    ) -> Result<Self, CudaError> {
        let is_hopper = device.capability() == (9, 0) && choice == KernelChoice::Fastest && head.weight.is_aligned();
        // SAFETY: this function's contract is the same.
        let mut planned = unsafe { DeviceTiled::unplanned(head, max_rows, device, choice) }?;
        if is_hopper {
            planned.hopper = Some(Hopper::new(&head.weight, max_rows, device)?);
        } else {
            let operand = Portable::operand(head.weight.dtype, head.weight.dtype);
            for instance in Portable::up_to(max_rows, operand, Epilogue::Draw) {
                planned.portable.push(device.portable(instance)?);
            }
        }
        Ok(planned)
    }

    /// [`DeviceTiled::with_kernels`] for the portable kernels, which are loaded when they are used.
    ///
    /// # Safety
    /// As [`DeviceTiled::new`].
    pub(crate) unsafe fn unplanned(
        head: DeviceHead,
        max_rows: usize,
        device: &Arc<Device>,
        choice: KernelChoice,
    ) -> Result<Self, CudaError> {
        head.check(max_rows, device)?;
        let size = LOGITS as usize + 4 * MAX_BLOCKS * device.multiprocessors() as usize * max_rows;
        // Ones are what the invalid keys begin with, and NaN for the logits, which nobody reads before they are written.
        let zeros = [BEST as usize..INVALID as usize, ARRIVED as usize..LOGITS as usize];
        let scratch = Scratch::new(size, &zeros, device)?;
        let device = device.clone();
        let (hopper, portable, log_z) = (None, Vec::new(), LogZ::default());
        Ok(DeviceTiled { device, head, choice, hopper, portable, scratch, log_z, max_rows })
    }

    /// Loads the kernels for rows of these kinds, for every number of rows of the plan: the first launch of them does not then, and
    /// can be captured, of hidden states of the weight's type, and on Hopper at addresses and strides that are multiples of 16
    /// bytes. Others take the portable kernel, which their first launch loads.
    ///
    /// # Errors
    /// [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn prepare(&mut self, kinds: RowFeatures) -> Result<(), CudaError> {
        match &mut self.hopper {
            Some(hopper) if kinds == RowFeatures::Any => {
                hopper.prepare(&FusedOutput::MasksPenalties(LogitStore::default()), &self.device)
            }
            _ => Ok(()),
        }
    }

    /// Goes on with another head like the planned one, of any number of tokens at any place of the vocabulary; of an
    /// [unplanned](DeviceTiled::unplanned) value alone.
    ///
    /// # Safety
    /// As [`DeviceTiled::new`] for the head, until it is moved on and the launches until then have run.
    pub(crate) unsafe fn move_to(&mut self, head: DeviceHead) {
        assert!(self.hopper.is_none(), "its maps are of the planned weight");
        self.log_z = LogZ::default();
        self.head = head;
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The global ids of the tokens.
    pub(crate) fn tokens(&self) -> Range<u32> {
        self.head.first_token..self.head.first_token + self.head.weight.rows as u32
    }

    /// Bytes of device memory that the plan holds besides the kernels.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch.len() + self.log_z.scratch_bytes()
    }

    /// Every launch has run: see [`Scratch::settle`].
    pub(crate) fn settle(&mut self) {
        self.scratch.settle();
        self.log_z.settle();
    }

    /// Draws for `hidden [rows, hidden]`: enqueues one launch on `stream` and returns. Tokens that cannot win are left out
    /// of it, so it cannot tell log Z: [`DeviceTiled::launch_with_log_z`] does.
    ///
    /// `rows` is the device address of one [`abi::Row`](crate::abi::Row) a row, `draws` of room for one
    /// [`abi::Draw`](crate::abi::Draw) a row; `kinds` says what the rows may have. On Hopper those of
    /// [`RowFeatures::Any`] take a kernel of their own, which the first such launch loads.
    ///
    /// # Errors
    /// * [`CudaError::Layout`]: the hidden states' width, stride or address; rows whose address is not a multiple of 8, draws
    ///   whose address is not one of 4.
    /// * [`CudaError::TooLarge`]: more rows than planned.
    /// * [`CudaError::Driver`], and [`CudaError::Compile`] where a kernel is needed that was not planned.
    ///
    /// # Safety
    /// * `hidden`, `rows`, `draws`, and what the rows point to, are device memory of this device, of the stated sizes,
    ///   until the launch has run.
    /// * The rows are as [`abi::Row`](crate::abi::Row) states, and of these kinds.
    /// * Launches of one planned value follow each other: on one stream, or ordered by events.
    /// * This value outlives the launch, and every launch of a graph that captured it.
    pub unsafe fn launch(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: u64,
        draws: u64,
        kinds: RowFeatures,
    ) -> Result<(), CudaError> {
        let output = if kinds == RowFeatures::Any {
            FusedOutput::MasksPenalties(LogitStore::default())
        } else {
            FusedOutput::Plain
        };
        // SAFETY: the same contract.
        unsafe { self.launch_any(stream, hidden, rows, draws, output) }.map(drop)
    }

    /// Whether the Hopper kernel takes these hidden states.
    fn is_hoppers(&self, hidden: &DeviceMatrix) -> bool {
        self.hopper.is_some() && hidden.dtype == self.head.weight.dtype && hidden.is_aligned()
    }

    /// Returns whether it was the portable kernel.
    ///
    /// # Safety
    /// As [`DeviceTiled::launch`]; with knobs or lists rows may be [`PENALISED`](crate::abi::PENALISED). What `output` names
    /// is device memory too. Lists only where [`DeviceTiled::lists`].
    unsafe fn launch_any(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: u64,
        draws: u64,
        output: FusedOutput,
    ) -> Result<bool, CudaError> {
        // A thread may have no current context, and the driver encodes maps by it.
        self.device.context().bind_to_thread().map_err(CudaError::driver("use the GPU on this thread"))?;
        check_rows(rows, draws)?;
        if !self.head.takes(hidden, self.max_rows)? {
            return Ok(false);
        }
        let call = self.call(hidden, rows, draws);
        let takes = self.is_hoppers(hidden);
        let Some(hopper) = self.hopper.as_mut().filter(|_| takes) else {
            let stored = if let FusedOutput::MasksPenalties(stored) = output { stored } else { LogitStore::default() };
            // SAFETY: the same contract.
            return unsafe { self.launch_portable(stream, hidden, &call, stored) }.map(|()| true);
        };
        // SAFETY: head and inputs by this function's and `new`'s contract; the scratch is this value's, sized by `new`
        // for every multiprocessor, and the kernel leaves it as it found it.
        unsafe { hopper.launch(stream, hidden, &call, &output, &self.device) }.map(|()| false)
    }

    fn call(&mut self, hidden: &DeviceMatrix, rows: u64, draws: u64) -> Call {
        let scratch = self.scratch.lend();
        Call {
            rows,
            bias: self.head.bias.unwrap_or(0),
            best: scratch + BEST,
            invalid: scratch + INVALID,
            logits: scratch + LOGITS,
            arrived: scratch + ARRIVED,
            draws,
            head: self.head.transform(),
            row_count: hidden.rows as u32,
            hidden: hidden.cols as u32,
            first_token: self.head.first_token,
            tokens: self.head.weight.rows as u32,
        }
    }

    /// # Safety
    /// As [`DeviceTiled::launch_storing`]; the logits may be null.
    unsafe fn launch_portable(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        call: &Call,
        stored: LogitStore,
    ) -> Result<(), CudaError> {
        let weight = &self.head.weight;
        let instance = Portable::for_rows(hidden.rows, Portable::operand(weight.dtype, hidden.dtype), Epilogue::Draw);
        // The smallest unit that an element of 16 bits allows.
        let largest = if self.choice == KernelChoice::PortableUnaligned { 2 } else { 16 };
        let matrices = Matrices::of(weight, hidden, largest);
        let kernel = match self.portable.iter().find(|kernel| kernel.portable == instance) {
            Some(kernel) => kernel,
            None => {
                self.portable.push(self.device.portable(instance)?);
                self.portable.last().expect("one was just added")
            }
        };
        // SAFETY: head and inputs by the caller's and `new`'s contract; the scratch is this value's, sized by `new` for the
        // most blocks, and the kernel leaves it as it found it; the instance is the one for these rows and types.
        unsafe { kernel.launch(stream, call, &matrices, &stored, kernel.blocks(call.tokens)) }
    }
}
