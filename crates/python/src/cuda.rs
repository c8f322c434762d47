//! Sampling over tensors on a GPU: calls that wait for their results, and calls whose parameters and tokens are
//! tensors.
#![allow(unsafe_code)]

use crate::error::{failed, invalid};
use crate::group::Group;
use crate::head::{Bias, HeadParts};
use crate::rows::Argument;
use crate::tensor::{Kind, Layout, Place, Tensor};
use flash_sampling::cuda::abi::{LogprobColumns, RowColumns, TokenColumns};
use flash_sampling::cuda::cudarc::driver::{CudaStream, result, sys};
use flash_sampling::cuda::{Device, DeviceAddress, DeviceHead, DeviceHidden, DeviceMatrix, DeviceSampler};
use flash_sampling::{Capabilities, CudaRank, CudaRankOptions, PerturbedArgmax, Plan, RowParams, SampleError, Samples};
use pyo3::prelude::*;
use std::sync::Arc;

/// A sampler over inputs in memory of a GPU.
pub(crate) struct OnDevice {
    /// The sampler reads the head's memory, so it is dropped before the head.
    sampler: OneOrRank,
    device: Arc<Device>,
    /// Set by the drop, and dropped after the sampler.
    context: Option<ThreadContext>,
    place: Place,
    #[expect(dead_code, reason = "kept for its drop")]
    head: Option<Arc<HeadParts>>,
}

/// A sampler of one GPU with all tokens, or a rank of several GPUs that share the vocabulary.
enum OneOrRank {
    One(DeviceSampler),
    Rank(Box<CudaRank<'static, Group>>),
}

impl Drop for OnDevice {
    fn drop(&mut self) {
        self.context = ThreadContext::present();
    }
}

/// A guard that restores a thread's current CUDA context on drop, because torch takes its current device from it.
struct ThreadContext(usize);

impl ThreadContext {
    /// Reads the context of this thread. The driver must be loaded.
    fn present() -> Option<ThreadContext> {
        let context = result::ctx::get_current().ok()?;
        Some(ThreadContext(context.map_or(0, |context| context as usize)))
    }
}

impl Drop for ThreadContext {
    fn drop(&mut self) {
        // SAFETY: the context was current on this thread at the start of a call, or there was none.
        let _ = unsafe { result::ctx::set_current(self.0 as sys::CUcontext) };
    }
}

impl OnDevice {
    /// Plans a sampler of existing logits on a GPU.
    ///
    /// # Errors
    /// Those of the GPU and the plan.
    pub(crate) fn for_logits(vocab_size: usize, plan: Plan, gpu: usize) -> PyResult<OnDevice> {
        Device::count().map_err(|error| failed(&error))?; // loads the driver
        let _context = ThreadContext::present();
        let device = Device::new(gpu).map_err(|error| failed(&error))?;
        let sampler = DeviceSampler::for_logits(vocab_size, plan, &device).map_err(|error| failed(&error))?;
        let place = Place::Cuda(gpu as i32);
        Ok(OnDevice { sampler: OneOrRank::One(sampler), device, context: None, place, head: None })
    }

    /// Waits for the work that produces weight and bias, and plans the sampler. With a group, the head is this rank's
    /// shard, and all ranks must call this function.
    ///
    /// # Errors
    /// Those of the GPU, the head, the plan and the group.
    pub(crate) fn of_head(parts: Arc<HeadParts>, plan: Plan, group: Option<Group>) -> PyResult<OnDevice> {
        let place = parts.weight.place();
        let Place::Cuda(id) = place else { return Err(invalid("head", "the head is not on a GPU")) };
        Device::count().map_err(|error| failed(&error))?; // loads the driver
        let _context = ThreadContext::present();
        let device = Device::new(usize::try_from(id).unwrap_or(0)).map_err(|error| failed(&error))?;
        let tokens = parts.vocab_size.saturating_sub(parts.first_token).min(parts.layout.rows);
        let as_u32 = |knob, value: usize| {
            u32::try_from(value).map_err(|_| invalid(knob, format!("{knob} is {value}, but must be below 2^32")))
        };
        let mut streams = vec![parts.weight.stream()];
        let bias = match &parts.bias {
            Bias::Device(bias) => {
                streams.push(bias.stream());
                Some(DeviceAddress::new(bias.address()))
            }
            Bias::None | Bias::Host(_) => None,
        };
        for at in streams {
            stream(&device, at).synchronize().map_err(|error| failed(&error))?;
        }
        let head = DeviceHead {
            weight: DeviceMatrix { rows: tokens, ..matrix(&parts.weight, &parts.layout) },
            first_token: as_u32("first_token", parts.first_token)?,
            bias,
            soft_cap: parts.soft_cap,
            scale: parts.scale,
        };
        let vocab_size = as_u32("vocab_size", parts.vocab_size)?;
        // SAFETY: weight and bias are tensors of this device, which the result holds and drops after the sampler.
        // `Tensor` checked their shapes. By the package's documentation, nothing writes to them during a call.
        let sampler = unsafe { DeviceSampler::new(head, vocab_size, plan, &device) };
        let sampler = sampler.map_err(|error| failed(&error))?;
        let sampler = match group {
            None => OneOrRank::One(sampler),
            Some(group) => {
                let options = CudaRankOptions { device: device.context().ordinal(), ..CudaRankOptions::default() };
                let rank = CudaRank::in_place(sampler, group, &options).map_err(|error| failed(&error))?;
                OneOrRank::Rank(Box::new(rank))
            }
        };
        Ok(OnDevice { sampler, device, context: None, place, head: Some(parts) })
    }

    pub(crate) fn capabilities(&self) -> Capabilities {
        match &self.sampler {
            OneOrRank::One(sampler) => sampler.capabilities(),
            OneOrRank::Rank(sampler) => sampler.capabilities(),
        }
    }

    pub(crate) fn plan(&self) -> Plan {
        match &self.sampler {
            OneOrRank::One(sampler) => sampler.plan(),
            OneOrRank::Rank(sampler) => sampler.plan(),
        }
    }

    pub(crate) fn vocab_size(&self) -> u32 {
        match &self.sampler {
            OneOrRank::One(sampler) => sampler.shape().vocab_size,
            OneOrRank::Rank(sampler) => sampler.shape().vocab_size,
        }
    }

    pub(crate) fn place(&self) -> Place {
        self.place
    }

    /// Draws after all prior work on the tensor's stream, and waits.
    ///
    /// # Errors
    /// Outer: the tensor is not a matrix on this GPU. Inner: the sampler's errors.
    pub(crate) fn sample(
        &mut self,
        input: &Tensor,
        what: &'static str,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> PyResult<Result<(), SampleError>> {
        let layout = input.layout(what)?;
        self.check_place(input, what)?;
        let _context = ThreadContext::present();
        let (stream, matrix) = (stream(&self.device, input.stream()), matrix(input, &layout));
        // SAFETY: the tensor is memory of this device, which `input` holds during the call. Its producer ordered the
        // work that writes it before later work on this stream. The stream is its caller's current stream, of this
        // device, and lives during the call; the driver refuses to wait for a stream that captures. A rank's call keeps
        // no hidden states and waits for its work.
        let sampled = unsafe {
            match &mut self.sampler {
                OneOrRank::One(sampler) => sampler.sample(&stream, &matrix, rows, out),
                OneOrRank::Rank(sampler) => {
                    let hidden = DeviceHidden::new(&stream, matrix).map_err(|error| failed(&error))?;
                    sampler.sample_device(&hidden, rows, out)
                }
            }
        };
        Ok(sampled)
    }

    /// Enqueues draws on the tensor's stream, and returns without waiting.
    ///
    /// # Errors
    /// The input is not a matrix on this GPU, or the GPU fails.
    pub(crate) fn enqueue(&mut self, input: &Tensor, what: &'static str, call: &DeviceCall) -> PyResult<()> {
        let layout = input.layout(what)?;
        self.check_place(input, what)?;
        let _context = ThreadContext::present();
        let OneOrRank::One(sampler) = &mut self.sampler else { return Err(no_enqueue()) };
        let (stream, matrix) = (stream(&self.device, input.stream()), matrix(input, &layout));
        // SAFETY: the input and `call` are tensors of this device, which `borrow` checked. Their libraries keep the
        // memory for work that is enqueued on this stream before the tensors are freed. Calls of this value on several
        // streams: by the package's documentation, the caller orders them. The stream lives as in `sample`.
        unsafe { sampler.enqueue(&stream, &matrix, &call.columns, &call.out) }.map_err(|error| failed(&error))
    }

    fn check_place(&self, input: &Tensor, what: &'static str) -> PyResult<()> {
        match input.place() == self.place {
            true => Ok(()),
            false => Err(invalid(what, format!("{what} is on {}, but must be on {}", input.place(), self.place))),
        }
    }
}

/// The error of `enqueue` with a group: ranks wait for each other on the host.
pub(crate) fn no_enqueue() -> PyErr {
    invalid("group", "a sampler with a group has no enqueue: call the sampler, which waits")
}

/// The tensors of a call that does not wait.
pub(crate) struct DeviceCall {
    rows: usize,
    place: Place,
    /// The stream of the input.
    stream: u64,
    columns: RowColumns,
    out: TokenColumns,
    /// Keeps the tensors until the kernels are enqueued. From then on, their libraries keep the memory for work on the
    /// stream.
    held: Vec<Tensor>,
}

impl DeviceCall {
    /// Borrows the tensors of a call for an input with `rows` rows. The call writes `out` and `statuses`.
    ///
    /// # Errors
    /// A tensor that is not on the GPU, or has another shape or element type; its name is the knob.
    pub(crate) fn borrow(
        (rows, input, vocab_size): (usize, &Tensor, u32),
        [seed, position]: [Argument<'_, '_>; 2],
        [temperature, top_p, min_p]: [Argument<'_, '_>; 3],
        [top_k, mask]: [Argument<'_, '_>; 2],
        [out, statuses]: [Argument<'_, '_>; 2],
    ) -> PyResult<DeviceCall> {
        const INTEGERS: &[Kind] = &[Kind::Int, Kind::UInt];
        let (columns, results) = (RowColumns::default(), TokenColumns::default());
        let (place, stream) = (input.place(), input.stream());
        let mut call = DeviceCall { rows, place, stream, columns, out: results, held: Vec::new() };
        call.columns.seed = call.column(seed, "seed", INTEGERS)?;
        call.columns.position = call.column(position, "position", INTEGERS)?;
        call.columns.temperature = call.column(temperature, "temperature", &[Kind::Float])?;
        call.columns.top_p = call.column(top_p, "top_p", &[Kind::Float])?;
        call.columns.min_p = call.column(min_p, "min_p", &[Kind::Float])?;
        call.columns.top_k = call.column(top_k, "top_k", &[Kind::Int])?;
        call.out.tokens = call.result(out, "out", &[Kind::Int])?;
        call.out.statuses = call.result(statuses, "statuses", INTEGERS)?;
        if let Some(mask) = mask {
            call.mask(mask, vocab_size.div_ceil(32) as usize)?;
        }
        Ok(call)
    }

    /// Borrows the tensors of log-probabilities and kept tokens. `mode` is the argument `logprobs_mode`.
    ///
    /// # Errors
    /// As [`DeviceCall::borrow`]; an unknown mode.
    pub(crate) fn borrow_logprobs(
        &mut self,
        mode: &str,
        [logprobs, ranks, log_z]: [Argument<'_, '_>; 3],
        [top_tokens, top_logprobs]: [Argument<'_, '_>; 2],
        [token_ids, token_logprobs]: [Argument<'_, '_>; 2],
        [kept_begin, kept_tokens]: [Argument<'_, '_>; 2],
    ) -> PyResult<()> {
        let mut columns = LogprobColumns {
            log_probs: self.result(logprobs, "logprobs", &[Kind::Float])?,
            ranks: self.result(ranks, "ranks", &[Kind::Int])?,
            log_z: self.result(log_z, "log_z", &[Kind::Float])?,
            ..LogprobColumns::default()
        };
        let top = [(top_tokens, "top_tokens"), (top_logprobs, "top_logprobs")];
        if let Some((object, name)) = top.iter().find_map(|&(object, name)| Some((object?, name))) {
            let width = self.width(object, name)?;
            let shape = [self.rows, width];
            columns.top_tokens = self.result_of(top_tokens, "top_tokens", &shape, &[Kind::Int])?;
            columns.top_log_probs = self.result_of(top_logprobs, "top_logprobs", &shape, &[Kind::Float])?;
            columns.top_n =
                u32::try_from(width).map_err(|_| invalid(name, format!("{name} has 2^32 columns or more")))?;
        }
        if let Some(object) = token_ids {
            let width = self.width(object, "logprob_token_ids")?;
            let shape = [self.rows, width];
            columns.token_ids = self.array(token_ids, "logprob_token_ids", &shape, &[Kind::Int])?;
            columns.token_log_probs = self.result_of(token_logprobs, "token_logprobs", &shape, &[Kind::Float])?;
            let too_many = |_| invalid("logprob_token_ids", "logprob_token_ids has 2^32 columns or more");
            columns.token_count = u32::try_from(width).map_err(too_many)?;
        }
        if token_ids.is_some() != token_logprobs.is_some() {
            return Err(invalid("token_logprobs", "logprob_token_ids and token_logprobs must be given together"));
        }
        match mode {
            "processed_logprobs" => self.out.processed = columns,
            "raw_logprobs" => self.out.raw = columns,
            _ => {
                let text = format!("logprobs_mode is {mode:?}, but must be processed_logprobs or raw_logprobs");
                return Err(invalid("logprobs_mode", text));
            }
        }
        let kept = &[Kind::Int];
        self.out.kept.begin = self.result_of(kept_begin, "kept_begin", &[self.rows + 1], kept)?;
        if let Some(tokens) = kept_tokens {
            let capacity = self.tensor(tokens, "kept_tokens")?.shape().first().copied().unwrap_or(0);
            self.out.kept.tokens = self.result_of(kept_tokens, "kept_tokens", &[capacity], kept)?;
            self.out.kept.capacity = capacity as u64;
        }
        Ok(())
    }

    /// Returns the number of columns of a tensor `[rows, n]`.
    fn width(&self, object: &Bound<'_, PyAny>, name: &'static str) -> PyResult<usize> {
        match *self.tensor(object, name)?.shape() {
            [_, width] => Ok(width),
            ref shape => Err(invalid(name, format!("{name} has shape {shape:?}, but must be [{}, n]", self.rows))),
        }
    }

    fn tensor(&self, object: &Bound<'_, PyAny>, name: &'static str) -> PyResult<Tensor> {
        let tensor = Tensor::borrow(object, name)?;
        if tensor.place() != self.place {
            return Err(invalid(name, format!("{name} is on {}, but must be on {}", tensor.place(), self.place)));
        }
        match tensor.stream() == self.stream {
            true => Ok(tensor),
            false => Err(invalid(name, format!("{name} is on another stream than the input"))),
        }
    }

    /// Borrows a tensor `[rows]` of contiguous elements with the size of `T`, and returns its address.
    fn column<T>(
        &mut self,
        object: Argument<'_, '_>,
        name: &'static str,
        kinds: &[Kind],
    ) -> PyResult<DeviceAddress<T>> {
        self.array(object, name, &[self.rows], kinds)
    }

    /// Borrows a contiguous tensor of a given shape, whose elements have the size of `T`, and returns its address.
    fn array<T>(
        &mut self,
        object: Argument<'_, '_>,
        name: &'static str,
        shape: &[usize],
        kinds: &[Kind],
    ) -> PyResult<DeviceAddress<T>> {
        let Some(object) = object else { return Ok(DeviceAddress::NULL) };
        let tensor = self.tensor(object, name)?;
        let mut step = 1;
        // The stride of a dimension with one element does not matter.
        let is_contiguous = shape.iter().zip(&tensor.strides).rev().all(|(&len, &stride)| {
            let is_next = len < 2 || stride == step;
            step *= len as isize;
            is_next
        });
        if tensor.shape() != shape || !is_contiguous || tensor.size != size_of::<T>() || !kinds.contains(&tensor.kind) {
            let (count, bits) =
                (shape.iter().map(usize::to_string).collect::<Vec<_>>().join(" x "), 8 * size_of::<T>());
            let kind = if kinds.contains(&Kind::Float) { "float" } else { "int" };
            return Err(invalid(name, format!("{name} must have {count} contiguous elements of {kind}{bits}")));
        }
        let address = DeviceAddress::new(tensor.address());
        self.held.push(tensor);
        Ok(address)
    }

    /// Borrows a tensor as [`DeviceCall::column`] does, and refuses a read-only tensor.
    fn result<T>(
        &mut self,
        object: Argument<'_, '_>,
        name: &'static str,
        kinds: &[Kind],
    ) -> PyResult<DeviceAddress<T>> {
        self.result_of(object, name, &[self.rows], kinds)
    }

    /// Borrows a tensor as [`DeviceCall::array`] does, and refuses a read-only tensor.
    fn result_of<T>(
        &mut self,
        object: Argument<'_, '_>,
        name: &'static str,
        shape: &[usize],
        kinds: &[Kind],
    ) -> PyResult<DeviceAddress<T>> {
        let address = self.array(object, name, shape, kinds)?;
        match self.held.last() {
            Some(tensor) if object.is_some() && tensor.is_read_only => {
                Err(invalid(name, format!("{name} is read-only")))
            }
            _ => Ok(address),
        }
    }

    /// Borrows masks `[rows, words]` with contiguous words, at least `needed`.
    fn mask(&mut self, object: &Bound<'_, PyAny>, needed: usize) -> PyResult<()> {
        let tensor = self.tensor(object, "mask")?;
        match (tensor.shape(), &tensor.strides[..]) {
            (&[rows, words], &[stride, step])
                if rows == self.rows
                    && words >= needed
                    && (step == 1 || words < 2)
                    && (stride >= 0 || rows < 2)
                    && tensor.size == 4
                    && matches!(tensor.kind, Kind::Int | Kind::UInt) =>
            {
                let words = u32::try_from(words).map_err(|_| invalid("mask", "mask has 2^32 words or more"))?;
                self.columns.mask = DeviceAddress::new(tensor.address());
                (self.columns.mask_words, self.columns.mask_stride) = (words, stride.max(0) as u64);
            }
            (shape, _) => {
                let rows = self.rows;
                let text =
                    format!("mask has shape {shape:?}, but must be [{rows}, {needed}] of int32 with contiguous words");
                return Err(invalid("mask", text));
            }
        }
        self.held.push(tensor);
        Ok(())
    }
}

fn matrix(tensor: &Tensor, layout: &Layout) -> DeviceMatrix {
    let Layout { dtype, rows, cols, row_stride } = *layout;
    DeviceMatrix { address: DeviceAddress::new(tensor.address()), dtype, rows, cols, row_stride }
}

/// The caller's stream at an address.
fn stream(device: &Device, address: u64) -> Arc<CudaStream> {
    // SAFETY: the address is that of torch's or CuPy's current stream of this device, or 0, the default stream. The
    // wrapper is dropped before the call returns to the caller, and work is ordered by the stream alone.
    unsafe { device.context().wrap_borrowed_stream(address as _) }
}
