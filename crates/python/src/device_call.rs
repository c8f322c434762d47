//! The tensors of a call that does not wait: parameters, tokens and other results in memory of a GPU.

use crate::error::{invalid, invalid_type};
use crate::tensor::{Kind, Place, Tensor};
use flash_sampling::cuda::DeviceAddress;
use flash_sampling::cuda::abi::{LogprobColumns, RowColumns, TokenColumns, TokenLists};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The keyword arguments of a call that are not `None`. A read argument is removed.
struct Arguments<'py>(Vec<(String, Bound<'py, PyAny>)>);

impl<'py> Arguments<'py> {
    fn read(given: Option<&Bound<'py, PyDict>>) -> PyResult<Self> {
        let given = given.into_iter().flat_map(|dict| dict.iter()).filter(|(_, value)| !value.is_none());
        given.map(|(name, value)| Ok((name.extract()?, value))).collect::<PyResult<_>>().map(Arguments)
    }

    fn take(&mut self, name: &str) -> Option<Bound<'py, PyAny>> {
        let at = self.0.iter().position(|(given, _)| given == name)?;
        Some(self.0.swap_remove(at).1)
    }

    /// Takes a flag; `None` is false.
    fn take_flag(&mut self, name: &str) -> PyResult<bool> {
        self.take(name).map_or(Ok(false), |flag| flag.extract())
    }

    fn take_required(&mut self, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self.take(name) {
            None => Err(invalid_type(format!("enqueue() needs the keyword argument {name}"))),
            given => Ok(given),
        }
    }

    /// Refuses arguments that were not read.
    fn check_empty(&self) -> PyResult<()> {
        match self.0.first() {
            Some((name, _)) => Err(invalid_type(format!("enqueue() has no keyword argument {name}"))),
            None => Ok(()),
        }
    }
}

/// The tensors of a call that does not wait.
pub(crate) struct DeviceCall {
    rows: usize,
    /// Whether the parameters have an index, so that their lengths may differ from the number of rows.
    has_index: bool,
    place: Place,
    /// The stream of the input.
    stream: u64,
    pub(crate) columns: RowColumns,
    pub(crate) out: TokenColumns,
    /// The argument with the tokens of a list, if there are lists.
    pub(crate) listed: Option<&'static str>,
    /// Keeps the tensors until the kernels are enqueued. From then on, their libraries keep the memory for work on the
    /// stream.
    held: Vec<Tensor>,
}

const INTEGERS: &[Kind] = &[Kind::Int, Kind::UInt];
const INT: &[Kind] = &[Kind::Int];
const FLOAT: &[Kind] = &[Kind::Float];

impl DeviceCall {
    /// Borrows the tensors of a call for an input with `rows` rows. `mode` is the argument `logprobs_mode`, and `given`
    /// has the other keyword arguments.
    ///
    /// # Errors
    /// * A tensor that is not on the GPU, or has another shape or element type; its name is the knob. A missing tensor;
    ///   an unknown mode.
    /// * `TypeError`: an unknown argument; a missing seed or position.
    pub(crate) fn borrow(
        (rows, input, vocab_size): (usize, &Tensor, u32),
        out: &Bound<'_, PyAny>,
        mode: &str,
        given: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<DeviceCall> {
        let mut given = Arguments::read(given)?;
        let mut call = DeviceCall {
            rows,
            has_index: false,
            place: input.place(),
            stream: input.stream(),
            columns: RowColumns::default(),
            out: TokenColumns::default(),
            listed: None,
            held: Vec::new(),
        };
        let index = given.take("index");
        call.has_index = index.is_some();
        call.columns.index = call.column(index, "index", INT)?;
        call.borrow_parameters(&mut given, vocab_size)?;
        call.borrow_lists(&mut given)?;
        call.out.tokens = call.result(Some(out.clone()), "out", INT)?;
        call.out.statuses = call.result(given.take("statuses"), "statuses", INTEGERS)?;
        let logprobs = call.borrow_logprobs(&mut given)?;
        match mode {
            "processed_logprobs" => call.out.processed = logprobs,
            "raw_logprobs" => call.out.raw = logprobs,
            _ => {
                let text = format!("logprobs_mode is {mode:?}, but must be processed_logprobs or raw_logprobs");
                return Err(invalid("logprobs_mode", text));
            }
        }
        call.borrow_kept(&mut given)?;
        call.out.is_complete = given.take_flag("complete")?.into();
        if call.out.is_complete != 0 && logprobs.top_n > vocab_size {
            let text = format!("with complete=True, top_tokens has at most {vocab_size} columns, one for each token");
            return Err(invalid("top_tokens", text));
        }
        given.check_empty()?;
        Ok(call)
    }

    /// Borrows the parameters with one element per row or index, and the masks.
    fn borrow_parameters(&mut self, given: &mut Arguments<'_>, vocab_size: u32) -> PyResult<()> {
        self.columns.seed = self.parameter(given.take_required("seed")?, "seed", INTEGERS)?;
        self.position(given.take_required("position")?)?;
        self.columns.top_k = self.parameter(given.take("top_k"), "top_k", INT)?;
        self.columns.min_tokens = self.parameter(given.take("min_tokens"), "min_tokens", INT)?;
        let mut float = |name| self.parameter(given.take(name), name, FLOAT);
        let (temperature, top_p, min_p) = (float("temperature")?, float("top_p")?, float("min_p")?);
        let [repetition_penalty, frequency_penalty, presence_penalty] =
            [float("repetition_penalty")?, float("frequency_penalty")?, float("presence_penalty")?];
        self.columns = RowColumns {
            temperature,
            top_p,
            min_p,
            repetition_penalty,
            frequency_penalty,
            presence_penalty,
            ..self.columns
        };
        match given.take("mask") {
            Some(mask) => self.mask(&mask, vocab_size.div_ceil(32) as usize),
            None => Ok(()),
        }
    }

    /// Borrows the positions, which may be int32.
    fn position(&mut self, object: Option<Bound<'_, PyAny>>) -> PyResult<()> {
        let Some(object) = object else { return Ok(()) };
        let (tensor, shape) = (self.tensor(&object, "position")?, [self.rows]);
        if (tensor.kind, tensor.size) == (Kind::Int, 4) {
            self.columns.position = self.hold::<i32>(tensor, "position", &shape, INT)?.cast();
            self.columns.has_short_positions = 1;
        } else {
            self.columns.position = self.hold(tensor, "position", &shape, INTEGERS)?;
        }
        Ok(())
    }

    /// Borrows the lists of tokens of each row or index.
    fn borrow_lists(&mut self, given: &mut Arguments<'_>) -> PyResult<()> {
        let (biases, values) =
            (self.lists(given, ["bias_begin", "bias_end", "bias_tokens"])?, given.take("bias_values"));
        if biases.is_some() != values.is_some() {
            return Err(invalid("bias_values", "bias_tokens and bias_values must be given together"));
        }
        let (lists, count) = biases.unwrap_or_default();
        self.columns.logit_bias = lists;
        self.columns.logit_bias_values = self.array(values, "bias_values", &[count], FLOAT)?;
        let mut lists = |names| Ok::<_, PyErr>(self.lists(given, names)?.unwrap_or_default().0);
        let banned = lists(["banned_begin", "banned_end", "banned_tokens"])?;
        let stop_tokens = lists(["stop_begin", "stop_end", "stop_tokens"])?;
        let prompt = lists(["prompt_begin", "prompt_end", "prompt_tokens"])?;
        let output = lists(["output_begin", "output_end", "output_tokens"])?;
        self.columns = RowColumns { banned, stop_tokens, prompt, output, ..self.columns };
        Ok(())
    }

    /// Borrows a list of tokens for each row, and returns the lists with the number of all tokens. Without the argument
    /// `end`, the lists are in CSR form.
    fn lists(
        &mut self,
        given: &mut Arguments<'_>,
        [begin, end, tokens]: [&'static str; 3],
    ) -> PyResult<Option<(TokenLists, usize)>> {
        let (begin_of, end_of) = (given.take(begin), given.take(end));
        let Some(object) = given.take(tokens) else {
            let lone = [(begin_of, begin), (end_of, end)].into_iter().find(|(given, _)| given.is_some());
            return lone.map_or(Ok(None), |(_, name)| Err(invalid(tokens, format!("{name} needs {tokens}"))));
        };
        if begin_of.is_none() {
            return Err(invalid(begin, format!("{tokens} needs {begin}")));
        }
        let tensor = self.tensor(&object, tokens)?;
        let count = len(&tensor);
        let mut lists = TokenLists { tokens: self.hold(tensor, tokens, &[count], INT)?, ..TokenLists::default() };
        lists.begin = self.parameter_of(begin_of, begin, INT, usize::from(end_of.is_none()))?;
        lists.end = match end_of {
            None => lists.begin.add(1),
            end_of => self.parameter(end_of, end, INT)?,
        };
        self.listed = Some(tokens);
        // A tensor without elements may have a null address.
        if self.rows == 0 {
            lists = TokenLists::default();
        }
        Ok(Some((lists, count)))
    }

    /// Borrows the tensors of log-probabilities.
    fn borrow_logprobs(&mut self, given: &mut Arguments<'_>) -> PyResult<LogprobColumns> {
        let mut columns = LogprobColumns {
            log_probs: self.result(given.take("logprobs"), "logprobs", FLOAT)?,
            ranks: self.result(given.take("ranks"), "ranks", INT)?,
            log_z: self.result(given.take("log_z"), "log_z", FLOAT)?,
            ..LogprobColumns::default()
        };
        let (tokens, logprobs) = (given.take("top_tokens"), given.take("top_logprobs"));
        let first = [(&tokens, "top_tokens"), (&logprobs, "top_logprobs")];
        let first = first.map(|(object, name)| object.as_ref().map(|object| (self.width(object, name), name)));
        if let Some((width, name)) = first.into_iter().flatten().next() {
            let width = width?;
            let shape = [self.rows, width];
            columns.top_tokens = self.result_of(tokens, "top_tokens", &shape, INT)?;
            columns.top_log_probs = self.result_of(logprobs, "top_logprobs", &shape, FLOAT)?;
            columns.top_n =
                u32::try_from(width).map_err(|_| invalid(name, format!("{name} has 2^32 columns or more")))?;
        }
        let (ids, logprobs) = (given.take("logprob_token_ids"), given.take("token_logprobs"));
        if ids.is_some() != logprobs.is_some() {
            return Err(invalid("token_logprobs", "logprob_token_ids and token_logprobs must be given together"));
        }
        if let Some(object) = &ids {
            let width = self.width(object, "logprob_token_ids")?;
            let shape = [self.rows, width];
            columns.token_ids = self.array(ids, "logprob_token_ids", &shape, INT)?;
            columns.token_log_probs = self.result_of(logprobs, "token_logprobs", &shape, FLOAT)?;
            let too_many = |_| invalid("logprob_token_ids", "logprob_token_ids has 2^32 columns or more");
            columns.token_count = u32::try_from(width).map_err(too_many)?;
        }
        Ok(columns)
    }

    /// Borrows the tensors of kept tokens.
    fn borrow_kept(&mut self, given: &mut Arguments<'_>) -> PyResult<()> {
        self.out.kept.begin = self.result_of(given.take("kept_begin"), "kept_begin", &[self.rows + 1], INT)?;
        if let Some(tokens) = given.take("kept_tokens") {
            let capacity = len(&self.tensor(&tokens, "kept_tokens")?);
            self.out.kept.tokens = self.result_of(Some(tokens), "kept_tokens", &[capacity], INT)?;
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

    /// Borrows a parameter: a tensor `[rows]`, or a tensor of any length if there is an index.
    fn parameter<T>(
        &mut self,
        object: Option<Bound<'_, PyAny>>,
        name: &'static str,
        kinds: &[Kind],
    ) -> PyResult<DeviceAddress<T>> {
        self.parameter_of(object, name, kinds, 0)
    }

    /// Borrows a parameter as [`DeviceCall::parameter`] does, with `more` elements than rows.
    fn parameter_of<T>(
        &mut self,
        object: Option<Bound<'_, PyAny>>,
        name: &'static str,
        kinds: &[Kind],
        more: usize,
    ) -> PyResult<DeviceAddress<T>> {
        let Some(object) = object else { return Ok(DeviceAddress::NULL) };
        let tensor = self.tensor(&object, name)?;
        let count = if self.has_index { len(&tensor) } else { self.rows + more };
        self.hold(tensor, name, &[count], kinds)
    }

    /// Borrows a tensor `[rows]` of contiguous elements with the size of `T`, and returns its address.
    fn column<T>(
        &mut self,
        object: Option<Bound<'_, PyAny>>,
        name: &'static str,
        kinds: &[Kind],
    ) -> PyResult<DeviceAddress<T>> {
        self.array(object, name, &[self.rows], kinds)
    }

    /// Borrows a contiguous tensor of a given shape, whose elements have the size of `T`, and returns its address.
    fn array<T>(
        &mut self,
        object: Option<Bound<'_, PyAny>>,
        name: &'static str,
        shape: &[usize],
        kinds: &[Kind],
    ) -> PyResult<DeviceAddress<T>> {
        let Some(object) = object else { return Ok(DeviceAddress::NULL) };
        let tensor = self.tensor(&object, name)?;
        self.hold(tensor, name, shape, kinds)
    }

    /// Checks a borrowed tensor as [`DeviceCall::array`] does, holds the tensor, and returns its address.
    fn hold<T>(
        &mut self,
        tensor: Tensor,
        name: &'static str,
        shape: &[usize],
        kinds: &[Kind],
    ) -> PyResult<DeviceAddress<T>> {
        let is_shaped = tensor.shape() == shape && tensor.is_contiguous();
        if !is_shaped || tensor.size != size_of::<T>() || !kinds.contains(&tensor.kind) {
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
        object: Option<Bound<'_, PyAny>>,
        name: &'static str,
        kinds: &[Kind],
    ) -> PyResult<DeviceAddress<T>> {
        self.result_of(object, name, &[self.rows], kinds)
    }

    /// Borrows a tensor as [`DeviceCall::array`] does, and refuses a read-only tensor.
    fn result_of<T>(
        &mut self,
        object: Option<Bound<'_, PyAny>>,
        name: &'static str,
        shape: &[usize],
        kinds: &[Kind],
    ) -> PyResult<DeviceAddress<T>> {
        let is_given = object.is_some();
        let address = self.array(object, name, shape, kinds)?;
        match self.held.last() {
            Some(tensor) if is_given && tensor.is_read_only => Err(invalid(name, format!("{name} is read-only"))),
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

/// The number of elements of a tensor with one dimension.
fn len(tensor: &Tensor) -> usize {
    tensor.shape().first().copied().unwrap_or(0)
}
