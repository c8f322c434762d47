//! The fused tiled variant over device memory (paper Alg. 1): the plan and the public launches.
//! `log_z` has the launches that compute log Z, `storing` the launches that store logits.
#![allow(unsafe_code)]

mod log_z;
mod storing;

use crate::abi::{Call, DeviceAddress, Draw, LogitStore, Matrices, Peers, Row};
use crate::device::alignment::check_rows;
use crate::device::fused_hopper::{FusedOutput, MAX_ROWS};
use crate::device::fused_portable::{Epilogue, LoadedPortable, MAX_BLOCKS, Portable, PortableOutput};
use crate::device::gpu::Device;
use crate::device::head::DeviceHead;
use crate::device::hopper::Hopper;
use crate::device::launch::Queue;
use crate::device::matrix::DeviceMatrix;
use crate::device::row_features::{KernelChoice, RowFeatures};
use crate::device::scratch::Scratch;
use crate::error::CudaError;
use crate::exchange::peers::DevicePeers;
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

/// Where the parts of the scratch begin, in bytes.
const BEST: usize = 0;
const INVALID: usize = BEST + 8 * MAX_ROWS;
const ARRIVED: usize = INVALID + 8 * MAX_ROWS;
const LOGITS: usize = ARRIVED + 256;

/// The addresses of a launch's rows and of its draws.
pub(crate) type RowsAndDraws = (DeviceAddress<Row>, DeviceAddress<Draw>);

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
        DeviceTiled::plan(head, max_rows, device, KernelChoice::default())
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
        DeviceTiled::plan(head, max_rows, device, choice)
    }

    /// [`DeviceTiled::with_kernels`]. Reads no device memory: whoever makes the [`Queue`] of a launch answers for the head.
    pub(crate) fn plan(
        head: DeviceHead,
        max_rows: usize,
        device: &Arc<Device>,
        choice: KernelChoice,
    ) -> Result<Self, CudaError> {
        let is_hopper = device.capability() == (9, 0) && choice == KernelChoice::Fastest && head.weight.is_aligned();
        let mut planned = DeviceTiled::unplanned(head, max_rows, device, choice)?;
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

    /// [`DeviceTiled::plan`] for the portable kernels, which are loaded when they are used.
    pub(crate) fn unplanned(
        head: DeviceHead,
        max_rows: usize,
        device: &Arc<Device>,
        choice: KernelChoice,
    ) -> Result<Self, CudaError> {
        head.check(max_rows, device)?;
        let size = LOGITS + 4 * MAX_BLOCKS * device.multiprocessors() as usize * max_rows;
        // Ones are what the invalid keys begin with, and NaN for the logits, which nobody reads before they are written.
        let zeros = [BEST..INVALID, ARRIVED..LOGITS];
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
    pub(crate) fn move_to(&mut self, head: DeviceHead) {
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

    /// Every launch has run: see [`Scratch::mark_idle`].
    pub(crate) fn mark_idle(&mut self) {
        self.scratch.mark_idle();
        self.log_z.mark_idle();
    }

    /// Draws for `hidden [rows, hidden]`: enqueues one launch on `stream` and returns. Tokens that cannot win are left out
    /// of it, so it cannot tell log Z: [`DeviceTiled::launch_with_log_z`] does.
    ///
    /// `rows` has one [`abi::Row`](crate::abi::Row) a row, `draws` room for one
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
        rows: DeviceAddress<Row>,
        draws: DeviceAddress<Draw>,
        kinds: RowFeatures,
    ) -> Result<(), CudaError> {
        // SAFETY: the bullets of this function and of `new`; the scratch is this value's, sized for every multiprocessor.
        let queue = unsafe { Queue::new(stream) };
        self.enqueue(queue, hidden, (rows, draws), kinds)
    }

    /// Draws as [`DeviceTiled::launch`] does, and computes log Z (paper App. L): `log_z` has room for one float64 a row, the
    /// logarithm of the row's mass, `ln sum e^l` over the transformed logits. The log-probability of the drawn token is its
    /// logit less that; of a row whose draw is an error it is not to be read.
    ///
    /// Rows that are [bare](RowFeatures::Bare), of a head without soft-cap, take one launch where the Hopper kernel serves them,
    /// and log Z is within 2e-6; if such a row has a mask or biases after all, NaN. Others take the two launches of
    /// [`DeviceGroups`](crate::DeviceGroups) by [`GroupRule::Maxima`](crate::GroupRule::Maxima), and log Z is within 1e-8. The first
    /// call of either kind loads kernels and allocates scratch: make one before a capture.
    ///
    /// # Errors
    /// As [`DeviceTiled::launch`]; [`CudaError::Layout`] also where `log_z` is not a multiple of 8.
    ///
    /// # Safety
    /// As [`DeviceTiled::launch`], for `log_z` too.
    pub unsafe fn launch_with_log_z(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: DeviceAddress<Row>,
        draws: DeviceAddress<Draw>,
        log_z: DeviceAddress<f64>,
        kinds: RowFeatures,
    ) -> Result<(), CudaError> {
        // SAFETY: the bullets of this function and of `new`; the scratch is this value's.
        let queue = unsafe { Queue::new(stream) };
        self.enqueue_with_log_z(queue, hidden, (rows, draws), log_z, kinds)
    }

    /// Draws as [`DeviceTiled::launch`] does, and stores the transformed logits (paper App. K), float32: that of row `r`
    /// and of the weight's row `t` at `logits + r * row_stride + t`. An invalid logit is stored as -inf, and its row's draw
    /// says so. Always the portable kernel's work, on Hopper too.
    ///
    /// # Errors
    /// As [`DeviceTiled::launch`]; [`CudaError::Layout`] also when the logits' address is not a multiple of 4 or
    /// `row_stride` is smaller than the weight's rows.
    ///
    /// # Safety
    /// As [`DeviceTiled::launch`]; the logits too are device memory of this device until the launch has run.
    pub unsafe fn launch_storing(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: DeviceAddress<Row>,
        draws: DeviceAddress<Draw>,
        logits: DeviceAddress<f32>,
        row_stride: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the bullets of this function and of `new`; the scratch is this value's.
        let queue = unsafe { Queue::new(stream) };
        self.enqueue_storing(queue, hidden, (rows, draws), logits, row_stride)
    }

    /// Loads the kernels that contain the exchange, for every number of rows of the plan.
    ///
    /// The first [`DeviceTiled::launch_sharded`] then loads no kernel, and can be captured. Ranks that share a GPU
    /// call this before any of them launches.
    ///
    /// # Errors
    /// [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn prepare_fan_out(&mut self) -> Result<(), CudaError> {
        self.prepare_leaving(&FusedOutput::FanOut(Peers::default()))
    }

    /// Draws from the whole vocabulary, with the same draws on every rank: [`DeviceTiled::launch`], then
    /// [`DevicePeers::launch`].
    ///
    /// Both are one launch if the Hopper kernel draws and the rows are not [`RowFeatures::Any`]: the last block makes the
    /// exchange. Each rank may use one launch or two, whatever the other ranks use.
    ///
    /// # Errors
    /// As [`DeviceTiled::launch`] and [`DevicePeers::launch`].
    ///
    /// # Safety
    /// As [`DeviceTiled::launch`] and [`DevicePeers::launch`], on the same device.
    pub unsafe fn launch_sharded(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: DeviceAddress<Row>,
        draws: DeviceAddress<Draw>,
        kinds: RowFeatures,
        peers: &mut DevicePeers,
    ) -> Result<(), CudaError> {
        // SAFETY: the bullets of this function and of `new`; the exchange follows the draws on one stream.
        let queue = unsafe { Queue::new(stream) };
        // A step fails before any of its launches.
        let call = peers.call(rows, draws, hidden.rows)?;
        if kinds != RowFeatures::Any && self.is_hoppers(hidden) && self.head.weight.rows > 0 {
            return self.launch_any(queue, hidden, (rows, draws), FusedOutput::FanOut(call)).map(drop);
        }
        self.enqueue(queue, hidden, (rows, draws), kinds)?;
        peers.enqueue(queue, (rows, draws), hidden.rows)
    }

    /// [`DeviceTiled::launch`].
    pub(crate) fn enqueue(
        &mut self,
        queue: Queue<'_>,
        hidden: &DeviceMatrix,
        rows: RowsAndDraws,
        kinds: RowFeatures,
    ) -> Result<(), CudaError> {
        let output = if kinds == RowFeatures::Any {
            FusedOutput::MasksPenalties(LogitStore::default())
        } else {
            FusedOutput::Plain
        };
        self.launch_any(queue, hidden, rows, output).map(drop)
    }

    /// Whether the Hopper kernel takes these hidden states.
    fn is_hoppers(&self, hidden: &DeviceMatrix) -> bool {
        self.hopper.is_some() && hidden.dtype == self.head.weight.dtype && hidden.is_aligned()
    }

    /// As [`DeviceTiled::launch`] with an output besides the draws, which is device memory too:
    /// * [`FusedOutput::MasksPenalties`]: the logits of all rows, by the fastest kernel;
    /// * [`FusedOutput::Lists`], where [`DeviceTiled::lists`]: the largest logits of rows with filters, which are drawn as
    ///   greedy ones where these decide;
    /// * [`FusedOutput::StoreLogits`], where [`DeviceTiled::stores_block_maxima`]: the raw logits of all rows and the largest
    ///   of each granule, of [`RowFeatures::Bare`] alone.
    ///
    /// Rows may be [`PENALISED`](crate::abi::PENALISED) with masks and penalties or lists. Returns whether stored logits are
    /// the transformed ones, of the portable kernel, and not the raw ones.
    pub(crate) fn launch_any(
        &mut self,
        queue: Queue<'_>,
        hidden: &DeviceMatrix,
        (rows, draws): RowsAndDraws,
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
        match self.hopper.as_mut().filter(|_| takes) {
            Some(hopper) => hopper.launch(queue, hidden, call, &output, &self.device).map(|()| false),
            None => {
                let to = if let FusedOutput::MasksPenalties(to) = output { to } else { LogitStore::default() };
                self.launch_portable(queue, hidden, call, to).map(|()| true)
            }
        }
    }

    fn call(&mut self, hidden: &DeviceMatrix, rows: DeviceAddress<Row>, draws: DeviceAddress<Draw>) -> Call {
        let scratch = self.scratch.begin_use::<u8>();
        Call {
            rows,
            bias: self.head.bias.unwrap_or_default(),
            best: scratch.add(BEST).cast(),
            invalid: scratch.add(INVALID).cast(),
            logits: scratch.add(LOGITS).cast(),
            arrived: scratch.add(ARRIVED).cast(),
            draws,
            head: self.head.transform(),
            row_count: hidden.rows as u32,
            hidden: hidden.cols as u32,
            first_token: self.head.first_token,
            tokens: self.head.weight.rows as u32,
        }
    }

    /// The portable kernel; the logits may be null.
    fn launch_portable(
        &mut self,
        queue: Queue<'_>,
        hidden: &DeviceMatrix,
        call: Call,
        stored: LogitStore,
    ) -> Result<(), CudaError> {
        let weight = &self.head.weight;
        let instance = Portable::for_rows(hidden.rows, Portable::operand(weight.dtype, hidden.dtype), Epilogue::Draw);
        // The smallest unit that an element of 16 bits allows.
        let largest = if self.choice == KernelChoice::PortableUnaligned { 2 } else { 16 };
        let matrices = Matrices::of(weight, hidden, largest);
        let kernel = LoadedPortable::of(&mut self.portable, instance, &self.device)?;
        kernel.launch(queue, call, matrices, PortableOutput::Draw(stored), kernel.blocks(call.tokens))
    }
}
