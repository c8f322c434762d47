//! The tensors of a call that does not wait: parameters, tokens and other results in memory of a GPU.

use crate::error::invalid;
use crate::rows::Argument;
use crate::tensor::{Kind, Place, Tensor};
use flash_sampling::cuda::DeviceAddress;
use flash_sampling::cuda::abi::{LogprobColumns, RowColumns, TokenColumns};
use pyo3::prelude::*;

/// The tensors of a call that does not wait.
pub(crate) struct DeviceCall {
    rows: usize,
    place: Place,
    /// The stream of the input.
    stream: u64,
    pub(crate) columns: RowColumns,
    pub(crate) out: TokenColumns,
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
