//! The fused tiled variant over device memory (paper Alg. 1): the plan and the public launches.
//! `log_z` has the launches that compute log Z, `storing` the launches that store logits, `shadow` the draws from a
//! shadow of the weight, and `sharded` the launches that exchange draws with other GPUs.
#![allow(unsafe_code)]

mod log_z;
mod shadow;
mod sharded;
mod storing;

use crate::abi::{Call, DeviceAddress, Draw, LogitStore, Matrices, Row, SkipIf};
use crate::device::fused_portable::MAX_BLOCKS;
use crate::device::hopper::Hopper;
use crate::device::shadow::ShadowKernels;
use crate::device::{
    Device, DeviceHead, DeviceMatrix, Epilogue, FusedOutput, KernelChoice, LoadedPortable, MAX_ROWS, Portable,
    PortableOutput, Products, Queue, Residency, RowFeatures, Scratch, check_rows,
};
use crate::error::CudaError;
use core::ops::Range;
use cudarc::driver::CudaStream;
use log_z::LogZ;
use std::sync::Arc;

/// The fused tiled variant over device memory, on the caller's stream.
///
/// A call has one launch. With a weight in fp8 or int8 on Hopper, a short launch before it scales the hidden states.
/// A call allocates nothing and does not wait, so a graph can capture it. The kernel reads positions from device memory
/// when it runs.
///
/// The plan has the kernels for hidden states of the weight's type, or bf16 for quantised weights, and of the weight's
/// alignment. On Hopper, it omits the kernels for [`RowFeatures::Any`], which [`DeviceTiled::prepare`] loads. Other
/// hidden states, and launches that store logits or compute log Z, use other kernels. The first such launch loads a
/// kernel, and compiles it if no cache has it. Loading waits for the GPU and cannot be captured, so make such a launch
/// before the capture.
#[derive(Debug)]
pub struct DeviceTiled {
    device: Arc<Device>,
    head: DeviceHead,
    choice: KernelChoice,
    /// The Hopper kernels, if they support the weight.
    hopper: Option<Hopper>,
    /// The kernels that read the shadow instead of the weight, if the head has a shadow.
    shadow: Option<ShadowKernels>,
    /// The portable kernels that are planned or were used.
    portable: Vec<Arc<LoadedPortable>>,
    /// Per row: ordered bits of the best winner, and the first invalid logit; a counter; a logit per block and row.
    scratch: Scratch,
    log_z: LogZ,
    max_rows: usize,
    /// Whether products are those of weights rounded to float32, also if scales could multiply the sums.
    rounds_weights: bool,
}

/// Byte offsets of the parts of the scratch.
const BEST: usize = 0;
const INVALID: usize = BEST + 8 * MAX_ROWS;
const ARRIVED: usize = INVALID + 8 * MAX_ROWS;
const LOGITS: usize = ARRIVED + 256;

/// The addresses of the rows and the draws of a launch.
pub(crate) type RowsAndDraws = (DeviceAddress<Row>, DeviceAddress<Draw>);

impl DeviceTiled {
    /// Plans calls of up to `max_rows` rows, at most 256: compiles and loads the kernels, and allocates the scratch.
    ///
    /// # Errors
    /// * [`CudaError::Architecture`]: the device is older than compute capability 8.0.
    /// * [`CudaError::Layout`]: the weight has no rows or no columns, a stride below its width, or a misaligned
    ///   address; or the bias has a misaligned address.
    /// * [`CudaError::Head`]: a scale or soft-cap is not finite and positive, or a token id is above 2^32 - 2.
    /// * [`CudaError::TooLarge`]: tokens, columns or rows.
    /// * [`CudaError::EmptyPlan`]: `max_rows` is 0.
    /// * [`CudaError::Compile`], [`CudaError::Driver`].
    ///
    /// # Safety
    /// * The head's weight, scales, bias and shadow are device memory of this device, of the stated sizes. They stay
    ///   valid and unchanged while this value is used and until all its launches have run.
    /// * This value outlives its launches and every launch of a graph that captured them. Dropping this value waits for
    ///   the GPU if launches may be pending, so it is not dropped while a stream of the context captures.
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

    /// [`DeviceTiled::with_kernels`]. Reads no device memory: the creator of a [`Queue`] guarantees the head's safety.
    pub(crate) fn plan(
        head: DeviceHead,
        max_rows: usize,
        device: &Arc<Device>,
        choice: KernelChoice,
    ) -> Result<Self, CudaError> {
        let is_hopper = device.capability() == (9, 0) && choice == KernelChoice::Fastest && head.suits_hopper();
        let mut planned = DeviceTiled::unplanned(head, max_rows, device, choice)?;
        if is_hopper {
            planned.hopper = Some(Hopper::new(&head, max_rows, device)?);
        }
        if planned.hopper.as_ref().is_none_or(|hopper| hopper.max_rows() < max_rows) {
            for instance in Portable::up_to(max_rows, Products::planned(&head), Epilogue::Draw) {
                planned.portable.push(device.portable(instance)?);
            }
        }
        planned.shadow = ShadowKernels::new(&head, max_rows, is_hopper, device)?;
        Ok(planned)
    }

    /// [`DeviceTiled::plan`] with portable kernels only, each loaded at its first use.
    pub(crate) fn unplanned(
        head: DeviceHead,
        max_rows: usize,
        device: &Arc<Device>,
        choice: KernelChoice,
    ) -> Result<Self, CudaError> {
        head.check(max_rows, device)?;
        let size = LOGITS + 4 * MAX_BLOCKS * device.multiprocessors() as usize * max_rows;
        // Invalid keys begin as ones. Logits begin as NaN, but kernels write them before any read.
        let zeros = [BEST..INVALID, ARRIVED..LOGITS];
        let scratch = Scratch::new(size, &zeros, device)?;
        let device = device.clone();
        let (hopper, shadow, portable, log_z) = (None, None, Vec::new(), LogZ::default());
        let rounds_weights = false;
        Ok(DeviceTiled { device, head, choice, hopper, shadow, portable, scratch, log_z, max_rows, rounds_weights })
    }

    /// Multiplies weights rounded to float32 in later launches, as the error bound of canonical plans requires: it does
    /// not cover sums of tiny products that a large scale multiplies.
    pub(crate) fn round_weights(&mut self) {
        self.rounds_weights = true;
        self.hopper.take_if(|_| self.head.can_scale_sums());
    }

    /// Loads the kernels for these row features, for every number of rows of the plan.
    ///
    /// The first launch of these rows then loads no kernel and can be captured. This holds for hidden states of the
    /// weight's type, or bf16 for quantised weights. On Hopper, addresses and strides of hidden states must also be
    /// multiples of 16 bytes. Other hidden states use the portable kernel, which their first launch loads.
    ///
    /// # Errors
    /// [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn prepare(&mut self, features: RowFeatures) -> Result<(), CudaError> {
        match &mut self.hopper {
            Some(hopper) if features == RowFeatures::Any => {
                hopper.prepare(&FusedOutput::MasksPenalties(LogitStore::default()), &self.device)
            }
            _ => Ok(()),
        }
    }

    /// Replaces the head of an [unplanned](DeviceTiled::unplanned) value by a head like it, with any range of tokens.
    pub(crate) fn move_to(&mut self, head: DeviceHead) {
        assert!(self.hopper.is_none(), "its maps are of the planned weight");
        self.log_z = LogZ::default();
        self.head = head;
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The token ids of the head, in the whole vocabulary.
    pub(crate) fn tokens(&self) -> Range<u32> {
        self.head.first_token..self.head.first_token + self.head.weight.rows as u32
    }

    /// Records that every launch has run: see [`Scratch::mark_idle`].
    pub(crate) fn mark_idle(&mut self) {
        self.scratch.mark_idle();
        self.log_z.mark_idle();
        self.hopper.iter_mut().for_each(Hopper::mark_idle);
        self.shadow.iter_mut().for_each(ShadowKernels::mark_idle);
    }

    /// Draws for `hidden [rows, hidden]`: enqueues the draw on `stream` and returns.
    ///
    /// The launch skips tokens that cannot win, so it has no log Z: see [`DeviceTiled::launch_with_log_z`].
    ///
    /// `rows` has one [`abi::Row`](crate::abi::Row) per row, and `draws` has room for one
    /// [`abi::Draw`](crate::abi::Draw) per row. `features` states the features of the rows. On Hopper,
    /// [`RowFeatures::Any`] uses a separate kernel, which the first such launch loads.
    ///
    /// # Errors
    /// * [`CudaError::Layout`]: the hidden states have an unsupported width, stride or address; the address of the rows
    ///   is not a multiple of 8, or the address of the draws not of 4.
    /// * [`CudaError::TooLarge`]: more rows than planned.
    /// * [`CudaError::Driver`]; [`CudaError::Compile`] if the launch needs a kernel outside the plan.
    ///
    /// # Safety
    /// * `hidden`, `rows`, `draws`, and all memory that the rows point to, are device memory of this device, of the
    ///   stated sizes, until the launch has run.
    /// * The rows are as [`abi::Row`](crate::abi::Row) states, and have only the features of `features`.
    /// * Launches of one planned value follow each other: on one stream, or ordered by events.
    /// * This value outlives the launch, and every launch of a graph that captured it.
    pub unsafe fn launch(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: DeviceAddress<Row>,
        draws: DeviceAddress<Draw>,
        features: RowFeatures,
    ) -> Result<(), CudaError> {
        // SAFETY: the bullets of this function and of `new`; this value owns the scratch, sized for every
        // multiprocessor.
        let queue = unsafe { Queue::new(stream) };
        self.enqueue(queue, hidden, (rows, draws), features)
    }

    /// Draws like [`DeviceTiled::launch`], and computes log Z (paper App. L).
    ///
    /// `log_z` has room for one float64 per row: the logarithm of the row's mass, `ln sum e^l` over the transformed
    /// logits. The log-probability of the drawn token is its logit minus log Z. If a row's draw is an error, its log Z
    /// is meaningless.
    ///
    /// [Bare](RowFeatures::Bare) rows of a head without soft-cap use the Hopper kernel if it supports every call that the
    /// plan allows. For a weight in fp8 or int8, these are plans of up to 128 rows. Log Z is then within 2e-6, or NaN if
    /// such a row does have a mask or biases. Other rows use the two launches of the grouped variant, whose best group
    /// has the tiled draw, and log Z is within 1e-8. The first call of each kind loads kernels and allocates
    /// scratch, so make it before a capture.
    ///
    /// # Errors
    /// As [`DeviceTiled::launch`]; [`CudaError::Layout`] also if the address of `log_z` is not a multiple of 8.
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
        features: RowFeatures,
    ) -> Result<(), CudaError> {
        // SAFETY: the bullets of this function and of `new`; this value owns the scratch.
        let queue = unsafe { Queue::new(stream) };
        self.enqueue_with_log_z(queue, hidden, (rows, draws), log_z, features)
    }

    /// [`DeviceTiled::launch`].
    pub(crate) fn enqueue(
        &mut self,
        queue: Queue<'_>,
        hidden: &DeviceMatrix,
        rows: RowsAndDraws,
        features: RowFeatures,
    ) -> Result<(), CudaError> {
        let output = if features == RowFeatures::Any {
            FusedOutput::MasksPenalties(LogitStore::default())
        } else {
            FusedOutput::Plain
        };
        self.launch_any(queue, hidden, rows, output).map(drop)
    }

    /// Whether the Hopper kernel supports these hidden states.
    fn is_hopper(&self, hidden: &DeviceMatrix) -> bool {
        // Of a longer call, a launch has at most the planned rows.
        self.hopper.as_ref().is_some_and(|hopper| hidden.rows.min(self.max_rows) <= hopper.max_rows())
            && hidden.dtype == self.head.hidden_dtype()
            && hidden.is_aligned()
    }

    /// Draws like [`DeviceTiled::launch`], with another output in device memory besides the draws:
    /// * [`FusedOutput::MasksPenalties`]: the logits of all rows, by the fastest kernel.
    /// * [`FusedOutput::Lists`], if [`DeviceTiled::lists`]: the largest logits of rows with filters. Rows with
    ///   listed filters are drawn as greedy rows.
    /// * [`FusedOutput::StoreLogits`], if [`DeviceTiled::stores_block_maxima`]: the raw logits of all rows and the
    ///   largest logit of each granule, for [`RowFeatures::Bare`] only.
    ///
    /// Rows may be [`PENALISED`](crate::abi::PENALISED) with masks and penalties or lists. Returns whether the stored
    /// logits are transformed. Otherwise they are raw: those of the Hopper kernel, or if the store requests it.
    pub(crate) fn launch_any(
        &mut self,
        queue: Queue<'_>,
        hidden: &DeviceMatrix,
        rows: RowsAndDraws,
        output: FusedOutput,
    ) -> Result<bool, CudaError> {
        self.launch_unless(SkipIf::default(), queue, hidden, rows, output)
    }

    /// [`DeviceTiled::launch_any`], or nothing if a word in device memory says so.
    pub(crate) fn launch_unless(
        &mut self,
        skip_if: SkipIf,
        queue: Queue<'_>,
        hidden: &DeviceMatrix,
        rows: RowsAndDraws,
        output: FusedOutput,
    ) -> Result<bool, CudaError> {
        let Some(mut call) = self.begin(hidden, rows, skip_if)? else { return Ok(false) };
        let is_hopper = self.is_hopper(hidden);
        let mut residency = Residency::Free;
        if output.is_draw() && self.uses_shadow(hidden) {
            debug_assert!(skip_if.word.is_null(), "a draw by a shadow has its own word");
            let shadow = self.shadow.as_mut().expect("it is used");
            call.skip_if = SkipIf::new(shadow.launch(queue, hidden, call, &self.device)?, 0);
            residency = Residency::Early;
        }
        match self.hopper.as_mut().filter(|_| is_hopper) {
            Some(hopper) => hopper.launch(queue, hidden, call, (&output, residency), &self.device).map(|()| false),
            None => {
                let mut stored = if let FusedOutput::MasksPenalties(to) = output { to } else { LogitStore::default() };
                // A call may have launches of both kernels, and the logits of one call are stored alike.
                stored.is_raw |= u32::from(self.hopper.is_some());
                self.launch_portable(queue, hidden, call, stored).map(|()| stored.is_raw == 0)
            }
        }
    }

    /// Checks the arguments of a launch, and returns the call; `None` without rows.
    fn begin(
        &mut self,
        hidden: &DeviceMatrix,
        (rows, draws): RowsAndDraws,
        skip_if: SkipIf,
    ) -> Result<Option<Call>, CudaError> {
        // A thread may have no current context, which the driver needs to encode maps.
        self.device.context().bind_to_thread().map_err(CudaError::driver("use the GPU on this thread"))?;
        check_rows(rows, draws)?;
        let has_rows = self.head.check_hidden(hidden, self.max_rows)?;
        Ok(has_rows.then(|| self.call(hidden, (rows, draws), skip_if)))
    }

    fn call(&mut self, hidden: &DeviceMatrix, (rows, draws): RowsAndDraws, skip_if: SkipIf) -> Call {
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
            skip_if,
        }
    }

    /// Launches the portable kernel; the address of the logits may be null.
    fn launch_portable(
        &mut self,
        queue: Queue<'_>,
        hidden: &DeviceMatrix,
        call: Call,
        stored: LogitStore,
    ) -> Result<(), CudaError> {
        let weight = &self.head.weight;
        let products = match Products::of(&self.head, hidden.dtype) {
            Products::TensorScaled(_) if self.rounds_weights => Products::Quantised,
            products => products,
        };
        let instance = Portable::for_rows(hidden.rows, products, Epilogue::Draw);
        // The smallest unit that 16-bit elements allow.
        let largest = if self.choice == KernelChoice::PortableUnaligned { 2 } else { 16 };
        let matrices = Matrices::of(weight, self.head.weight_scales(), hidden, largest);
        let kernel = LoadedPortable::of(&mut self.portable, instance, &self.device)?;
        kernel.launch(queue, call, matrices, PortableOutput::Draw(stored), kernel.blocks(call.tokens))
    }
}
