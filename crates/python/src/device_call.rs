//! The tensors of a call that does not wait: parameters, tokens and other results in memory of a GPU.

use crate::error::{invalid, invalid_type};
use crate::tensor::{Kind, Place, Tensor};
use flash_sampling::cuda::DeviceAddress;
use flash_sampling::cuda::abi::{LogprobColumns, RowColumns, TokenColumns, TokenLists};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The tensors of a call that does not wait.
#[derive(Default)]
pub(crate) struct DeviceCall {
    pub(crate) columns: RowColumns,
    pub(crate) out: TokenColumns,
    /// The argument with the tokens of a list, if there are lists.
    pub(crate) listed: Option<&'static str>,
    /// Keeps the tensors until the kernels are enqueued. From then on, their libraries keep the memory for work on the
    /// stream.
    held: Vec<Tensor>,
}

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
        let has_index = given.has("index");
        given.0.push(("out".into(), out.clone()));
        let (place, stream, call) = (input.place, input.stream, DeviceCall::default());
        let mut reader = Reader { given, rows, has_index, place, stream, call };
        reader.call.columns.index = reader.array("index", &[rows])?;
        reader.read_parameters(vocab_size)?;
        reader.read_lists()?;
        reader.call.out.tokens = reader.result("out", &[rows])?;
        reader.call.out.statuses = reader.result("statuses", &[rows])?;
        let logprobs = reader.read_logprobs()?;
        match mode {
            "processed_logprobs" => reader.call.out.processed = logprobs,
            "raw_logprobs" => reader.call.out.raw = logprobs,
            _ => {
                let text = format!("logprobs_mode is {mode:?}, but must be processed_logprobs or raw_logprobs");
                return Err(invalid("logprobs_mode", text));
            }
        }
        reader.read_kept()?;
        let Reader { mut given, mut call, .. } = reader;
        call.out.is_complete = given.take("complete").map_or(Ok(false), |flag| flag.extract())?.into();
        if call.out.is_complete != 0 && logprobs.top_n > vocab_size {
            let text = format!("with complete=True, top_tokens has at most {vocab_size} columns, one for each token");
            return Err(invalid("top_tokens", text));
        }
        given.check_empty()?;
        Ok(call)
    }
}

/// The keyword arguments of a call that are not `None`. A read argument is removed.
struct Arguments<'py>(Vec<(String, Bound<'py, PyAny>)>);

impl<'py> Arguments<'py> {
    fn read(given: Option<&Bound<'py, PyDict>>) -> PyResult<Self> {
        let given = given.into_iter().flat_map(|dict| dict.iter()).filter(|(_, value)| !value.is_none());
        given.map(|(name, value)| Ok((name.extract()?, value))).collect::<PyResult<_>>().map(Arguments)
    }

    fn get(&self, name: &str) -> Option<&Bound<'py, PyAny>> {
        self.0.iter().find(|(given, _)| given == name).map(|(_, value)| value)
    }

    fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    fn take(&mut self, name: &str) -> Option<Bound<'py, PyAny>> {
        let at = self.0.iter().position(|(given, _)| given == name)?;
        Some(self.0.swap_remove(at).1)
    }

    /// Refuses a call without an argument.
    fn require(&self, name: &str) -> PyResult<()> {
        match self.has(name) {
            true => Ok(()),
            false => Err(invalid_type(format!("enqueue() needs the keyword argument {name}"))),
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

/// An element of an array, and the kinds of tensors that have such elements.
trait Element {
    const KINDS: &'static [Kind];
}

macro_rules! elements {
    ($($element:ty: $kinds:expr;)+) => {
        $(impl Element for $element {
            const KINDS: &'static [Kind] = &$kinds;
        })+
    };
}

// Integers without a sign are also given as integers with the same bits.
elements! {
    i32: [Kind::Int];
    i64: [Kind::Int];
    u32: [Kind::Int, Kind::UInt];
    u64: [Kind::Int, Kind::UInt];
    f32: [Kind::Float];
    f64: [Kind::Float];
}

/// Reads the arguments of a call. An argument that is not given has a null address.
struct Reader<'py> {
    given: Arguments<'py>,
    rows: usize,
    /// Whether the parameters have an index, so that their lengths may differ from the number of rows.
    has_index: bool,
    place: Place,
    /// The stream of the input.
    stream: u64,
    call: DeviceCall,
}

impl<'py> Reader<'py> {
    /// Reads the parameters with one element per row or index, and the masks.
    fn read_parameters(&mut self, vocab_size: u32) -> PyResult<()> {
        self.given.require("seed")?;
        self.call.columns.seed = self.parameter("seed", 0)?;
        self.read_position()?;
        self.call.columns.top_k = self.parameter("top_k", 0)?;
        self.call.columns.min_tokens = self.parameter("min_tokens", 0)?;
        self.call.columns.temperature = self.parameter("temperature", 0)?;
        self.call.columns.top_p = self.parameter("top_p", 0)?;
        self.call.columns.min_p = self.parameter("min_p", 0)?;
        self.call.columns.repetition_penalty = self.parameter("repetition_penalty", 0)?;
        self.call.columns.frequency_penalty = self.parameter("frequency_penalty", 0)?;
        self.call.columns.presence_penalty = self.parameter("presence_penalty", 0)?;
        self.read_mask(vocab_size.div_ceil(32) as usize)
    }

    /// Reads the positions, which may be int32.
    fn read_position(&mut self) -> PyResult<()> {
        self.given.require("position")?;
        let Some(tensor) = self.take("position")? else { return Ok(()) };
        let shape = [self.rows];
        if (tensor.kind, tensor.size) == (Kind::Int, 4) {
            self.call.columns.position = self.hold::<i32>(tensor, "position", &shape)?.cast();
            self.call.columns.has_short_positions = 1;
        } else {
            self.call.columns.position = self.hold(tensor, "position", &shape)?;
        }
        Ok(())
    }

    /// Reads masks `[rows, words]` with contiguous words, at least `needed`.
    fn read_mask(&mut self, needed: usize) -> PyResult<()> {
        let Some(tensor) = self.take("mask")? else { return Ok(()) };
        match (&tensor.shape[..], &tensor.strides[..]) {
            (&[rows, words], &[stride, step])
                if rows == self.rows
                    && words >= needed
                    && (step == 1 || words < 2)
                    && (stride >= 0 || rows < 2)
                    && tensor.size == 4
                    && matches!(tensor.kind, Kind::Int | Kind::UInt) =>
            {
                let words = u32::try_from(words).map_err(|_| invalid("mask", "mask has 2^32 words or more"))?;
                let columns = &mut self.call.columns;
                columns.mask = DeviceAddress::new(tensor.address());
                (columns.mask_words, columns.mask_stride) = (words, stride.max(0) as u64);
            }
            (shape, _) => {
                let rows = self.rows;
                let text =
                    format!("mask has shape {shape:?}, but must be [{rows}, {needed}] of int32 with contiguous words");
                return Err(invalid("mask", text));
            }
        }
        self.call.held.push(tensor);
        Ok(())
    }

    /// Reads the lists of tokens of each row or index.
    fn read_lists(&mut self) -> PyResult<()> {
        let biases = self.lists(["bias_begin", "bias_end", "bias_tokens"])?;
        if biases.is_some() != self.given.has("bias_values") {
            return Err(invalid("bias_values", "bias_tokens and bias_values must be given together"));
        }
        let (lists, count) = biases.unwrap_or_default();
        self.call.columns.logit_bias = lists;
        self.call.columns.logit_bias_values = self.array("bias_values", &[count])?;
        let mut lists = |names| Ok::<_, PyErr>(self.lists(names)?.unwrap_or_default().0);
        let banned = lists(["banned_begin", "banned_end", "banned_tokens"])?;
        let stop_tokens = lists(["stop_begin", "stop_end", "stop_tokens"])?;
        let prompt = lists(["prompt_begin", "prompt_end", "prompt_tokens"])?;
        let output = lists(["output_begin", "output_end", "output_tokens"])?;
        self.call.columns = RowColumns { banned, stop_tokens, prompt, output, ..self.call.columns };
        Ok(())
    }

    /// Reads a list of tokens for each row, and returns the lists with the number of all tokens. Without the argument
    /// `end`, the lists are in CSR form.
    fn lists(&mut self, [begin, end, tokens]: [&'static str; 3]) -> PyResult<Option<(TokenLists, usize)>> {
        if !self.given.has(tokens) {
            let lone = [begin, end].into_iter().find(|name| self.given.has(name));
            return lone.map_or(Ok(None), |name| Err(invalid(tokens, format!("{name} needs {tokens}"))));
        }
        if !self.given.has(begin) {
            return Err(invalid(begin, format!("{tokens} needs {begin}")));
        }
        let Some(tensor) = self.take(tokens)? else { return Ok(None) };
        let (count, is_csr) = (len(&tensor), !self.given.has(end));
        let mut lists = TokenLists { tokens: self.hold(tensor, tokens, &[count])?, ..TokenLists::default() };
        lists.begin = self.parameter(begin, usize::from(is_csr))?;
        lists.end = if is_csr { lists.begin.add(1) } else { self.parameter(end, 0)? };
        self.call.listed = Some(tokens);
        // A tensor without elements may have a null address.
        if self.rows == 0 {
            lists = TokenLists::default();
        }
        Ok(Some((lists, count)))
    }

    /// Reads the tensors of log-probabilities.
    fn read_logprobs(&mut self) -> PyResult<LogprobColumns> {
        let rows = self.rows;
        let mut columns = LogprobColumns {
            log_probs: self.result("logprobs", &[rows])?,
            ranks: self.result("ranks", &[rows])?,
            log_z: self.result("log_z", &[rows])?,
            ..LogprobColumns::default()
        };
        let (has_ids, has_logprobs) = (self.given.has("logprob_token_ids"), self.given.has("token_logprobs"));
        if let Some(name) = ["top_tokens", "top_logprobs"].into_iter().find(|name| self.given.has(name)) {
            let shape = [rows, self.width(name)?];
            columns.top_tokens = self.result("top_tokens", &shape)?;
            columns.top_log_probs = self.result("top_logprobs", &shape)?;
            columns.top_n = column_count(shape[1], name)?;
        }
        if has_ids != has_logprobs {
            return Err(invalid("token_logprobs", "logprob_token_ids and token_logprobs must be given together"));
        }
        if has_ids {
            let shape = [rows, self.width("logprob_token_ids")?];
            columns.token_ids = self.array("logprob_token_ids", &shape)?;
            columns.token_log_probs = self.result("token_logprobs", &shape)?;
            columns.token_count = column_count(shape[1], "logprob_token_ids")?;
        }
        Ok(columns)
    }

    /// Reads the tensors of kept tokens.
    fn read_kept(&mut self) -> PyResult<()> {
        self.call.out.kept.begin = self.result("kept_begin", &[self.rows + 1])?;
        if let Some(tokens) = self.given.get("kept_tokens") {
            let capacity = len(&self.tensor(tokens, "kept_tokens")?);
            self.call.out.kept.tokens = self.result("kept_tokens", &[capacity])?;
            self.call.out.kept.capacity = capacity as u64;
        }
        Ok(())
    }

    /// Returns the number of columns of a given tensor `[rows, n]`.
    fn width(&self, name: &'static str) -> PyResult<usize> {
        let Some(object) = self.given.get(name) else { return Ok(0) };
        match self.tensor(object, name)?.shape[..] {
            [_, width] => Ok(width),
            ref shape => Err(invalid(name, format!("{name} has shape {shape:?}, but must be [{}, n]", self.rows))),
        }
    }

    fn tensor(&self, object: &Bound<'_, PyAny>, name: &'static str) -> PyResult<Tensor> {
        let tensor = Tensor::borrow(object, name)?;
        if tensor.place != self.place {
            return Err(invalid(name, format!("{name} is on {}, but must be on {}", tensor.place, self.place)));
        }
        match tensor.stream == self.stream {
            true => Ok(tensor),
            false => Err(invalid(name, format!("{name} is on another stream than the input"))),
        }
    }

    fn take(&mut self, name: &'static str) -> PyResult<Option<Tensor>> {
        let object = self.given.take(name);
        object.map(|object| self.tensor(&object, name)).transpose()
    }

    /// Reads a parameter: a tensor with `more` elements than rows, or of any length if there is an index.
    fn parameter<T: Element>(&mut self, name: &'static str, more: usize) -> PyResult<DeviceAddress<T>> {
        let Some(tensor) = self.take(name)? else { return Ok(DeviceAddress::NULL) };
        let count = if self.has_index { len(&tensor) } else { self.rows + more };
        self.hold(tensor, name, &[count])
    }

    /// Reads a contiguous tensor of a given shape.
    fn array<T: Element>(&mut self, name: &'static str, shape: &[usize]) -> PyResult<DeviceAddress<T>> {
        match self.take(name)? {
            Some(tensor) => self.hold(tensor, name, shape),
            None => Ok(DeviceAddress::NULL),
        }
    }

    /// Reads a contiguous tensor of a given shape, and refuses a read-only tensor.
    fn result<T: Element>(&mut self, name: &'static str, shape: &[usize]) -> PyResult<DeviceAddress<T>> {
        let is_given = self.given.has(name);
        let address = self.array(name, shape)?;
        match self.call.held.last() {
            Some(tensor) if is_given && tensor.is_read_only => Err(invalid(name, format!("{name} is read-only"))),
            _ => Ok(address),
        }
    }

    /// Checks shape and elements of a tensor, holds the tensor, and returns its address.
    fn hold<T: Element>(&mut self, tensor: Tensor, name: &'static str, shape: &[usize]) -> PyResult<DeviceAddress<T>> {
        let is_shaped = tensor.shape == shape && tensor.is_contiguous();
        if !is_shaped || tensor.size != size_of::<T>() || !T::KINDS.contains(&tensor.kind) {
            let (count, bits) =
                (shape.iter().map(usize::to_string).collect::<Vec<_>>().join(" x "), 8 * size_of::<T>());
            let kind = if T::KINDS.contains(&Kind::Float) { "float" } else { "int" };
            return Err(invalid(name, format!("{name} must have {count} contiguous elements of {kind}{bits}")));
        }
        let address = DeviceAddress::new(tensor.address());
        self.call.held.push(tensor);
        Ok(address)
    }
}

fn column_count(width: usize, name: &'static str) -> PyResult<u32> {
    u32::try_from(width).map_err(|_| invalid(name, format!("{name} has 2^32 columns or more")))
}

/// The number of elements of a tensor with one dimension.
fn len(tensor: &Tensor) -> usize {
    tensor.shape.first().copied().unwrap_or(0)
}
