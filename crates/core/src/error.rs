//! The errors of a head, a call, or a row.

use crate::matrix::DType;
use crate::params::knob::Knob;
use core::fmt;

/// The stage of a bad logit, in the order of precedence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Before the row's transforms.
    Raw,
    /// After the row's transforms.
    #[default]
    Transformed,
}

/// A row's error, and the stage of its bad logit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagedError {
    /// The stage of the bad logit; [`Stage::Transformed`] for an error without a logit.
    pub stage: Stage,
    /// The error.
    pub error: RowError,
}

impl StagedError {
    fn rank(&self) -> (Stage, u32) {
        match self.error {
            RowError::NaN { token } | RowError::PositiveInfinity { token } => (self.stage, token),
            _ => (Stage::Transformed, u32::MAX),
        }
    }

    /// The error of a row with two errors.
    ///
    /// A raw logit precedes a transformed logit, then the lower token comes first. Errors of logits precede other
    /// errors. Of two other errors, the result is `a`.
    pub fn first(a: Option<StagedError>, b: Option<StagedError>) -> Option<StagedError> {
        match (a, b) {
            (Some(a), Some(b)) => Some(if b.rank() < a.rank() { b } else { a }),
            (a, b) => a.or(b),
        }
    }
}

/// The reason why a row has no draw. The error does not affect the other rows of the call.
///
/// If several logits of a row are bad, the error names the raw logit before a transformed logit, then the lowest token.
/// The same holds over shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RowError {
    /// Every token is masked, banned or has logit -inf.
    #[error("no token can be drawn: each is masked, banned or has logit -inf")]
    NoFiniteLogit,
    /// A logit is NaN.
    #[error("the logit of token {token} is NaN")]
    NaN {
        /// The lowest such token.
        token: u32,
    },
    /// A logit is +inf, before or after the transforms.
    #[error("the logit of token {token} is +inf")]
    PositiveInfinity {
        /// The lowest such token.
        token: u32,
    },
    /// A row requests more draws without replacement than tokens remain after masks, bans and filters.
    #[error("{draws} draws without replacement from {available} token{} that can be drawn", if *available == 1 { "" } else { "s" })]
    SupportTooSmall {
        /// The requested number of draws.
        draws: u32,
        /// The number of remaining tokens.
        available: u32,
    },
    /// A knob's value is out of range.
    #[error("{knob} is {value}, but must be {range}")]
    OutOfRange {
        /// The knob.
        knob: Knob,
        /// Its value.
        value: KnobValue,
        /// The valid range.
        range: &'static str,
    },
    /// A knob names a token outside the vocabulary.
    #[error("{knob} names token {token}, but the vocabulary has size {vocab_size}")]
    UnknownToken {
        /// The knob.
        knob: Knob,
        /// The token.
        token: u32,
        /// Tokens of the vocabulary.
        vocab_size: u32,
    },
    /// A knob's value is invalid for another reason.
    #[error("{knob} {reason}")]
    Invalid {
        /// The knob.
        knob: Knob,
        /// The fault.
        reason: &'static str,
    },
    /// This backend or variant does not support a knob.
    #[error("{knob} is not supported by this sampler; {alternative} has it")]
    Unsupported {
        /// The knob.
        knob: Knob,
        /// A sampler with the knob: [`Capabilities::alternative`](crate::Capabilities::alternative).
        alternative: &'static str,
    },
    /// A knob needs room in the plan, and the plan has none.
    #[error("{knob} must be planned for: Plan::max_{knob} is none")]
    Unplanned {
        /// The knob.
        knob: Knob,
    },
    /// A knob's value exceeds the plan.
    #[error("{knob} is {requested}, but Plan::max_{knob} is {planned}")]
    BeyondPlan {
        /// The knob.
        knob: Knob,
        /// The row's value.
        requested: u64,
        /// The plan's limit.
        planned: u64,
    },
}

impl RowError {
    /// Whether a logit is bad: NaN or +inf.
    pub fn is_bad_logit(&self) -> bool {
        matches!(self, RowError::NaN { .. } | RowError::PositiveInfinity { .. })
    }
}

/// The reason why a whole call has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// The widths of input and head differ.
    #[error("the input has {found} columns, but the head has hidden size {expected}")]
    Hidden {
        /// Columns of the input.
        found: usize,
        /// The head's hidden size.
        expected: usize,
    },
    /// The input's elements are not floats.
    #[error("the input is {}, but must be bf16, f16 or f32", found.name())]
    InputType {
        /// Element type of the input.
        found: DType,
    },
    /// The numbers of rows and of row parameters differ.
    #[error("{params} row parameters for {rows} rows")]
    RowCount {
        /// Rows of the input.
        rows: usize,
        /// Row parameters given.
        params: usize,
    },
    /// More rows than planned.
    #[error("{rows} rows, but the plan allows {max_rows}")]
    TooManyRows {
        /// Rows of the input.
        rows: usize,
        /// The plan's limit.
        max_rows: usize,
    },
    /// This backend or variant does not support a knob of the plan.
    #[error("{knob} is not supported by this sampler")]
    Unsupported {
        /// The knob.
        knob: Knob,
    },
    /// The backend failed, for the reason in `source`.
    #[error("{backend} failed")]
    Backend {
        /// The backend's name.
        backend: &'static str,
        /// The backend's own error.
        #[source]
        source: Box<dyn core::error::Error + Send + Sync>,
    },
}

/// The reason why a matrix or an LM head cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeadError {
    /// The buffer does not hold the matrix.
    #[error("a [{rows}, {cols}] matrix with row stride {row_stride} needs {needed} bytes, found {found}")]
    Length {
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
        /// Elements from one row to the next.
        row_stride: usize,
        /// The required bytes.
        needed: usize,
        /// The actual bytes.
        found: usize,
    },
    /// A dimension is zero, too large, or its stride is smaller than its row.
    #[error("a matrix of shape [{rows}, {cols}] with row stride {row_stride} cannot be used: {reason}")]
    Shape {
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
        /// Elements from one row to the next.
        row_stride: usize,
        /// The fault.
        reason: &'static str,
    },
    /// Scales that do not fit the matrix, or a matrix of a type without scales.
    #[error("{found} scales for a matrix of type {}, which needs {needed}", dtype.name())]
    Scales {
        /// Element type of the matrix.
        dtype: DType,
        /// The required scales; 0 if the type has none.
        needed: usize,
        /// The given scales.
        found: usize,
    },
    /// A block of weights that share a scale has no rows or no columns.
    #[error("a scale cannot be for a block of {rows} rows and {cols} columns: both must be 1 or more")]
    ScaleBlock {
        /// Rows of a block.
        rows: usize,
        /// Columns of a block.
        cols: usize,
    },
    /// The parts of a shadow do not match.
    #[error("a shadow needs {needed} {part}, found {found}")]
    ShadowLength {
        /// The name of the part.
        part: &'static str,
        /// The required elements.
        needed: usize,
        /// The given elements.
        found: usize,
    },
    /// The shadow is of another weight.
    #[error("a shadow [{}, {}] does not fit a weight [{}, {}]", shadow[0], shadow[1], weight[0], weight[1])]
    ShadowShape {
        /// Rows and columns of the shadow.
        shadow: [usize; 2],
        /// Rows and columns of the weight.
        weight: [usize; 2],
    },
    /// Only a weight of floats has a shadow.
    #[error(
        "a weight of type {} has no shadow: it must be bf16, f16 or f32; GGUF blocks are small already and need none",
        dtype.name()
    )]
    ShadowType {
        /// Element type of the weight.
        dtype: DType,
    },
    /// The length of the bias is not the number of weight rows.
    #[error("the bias has {found} entries, but the weight has {expected} rows")]
    BiasLength {
        /// Entries of the bias.
        found: usize,
        /// Rows of the weight.
        expected: usize,
    },
    /// A bias entry is NaN or +inf.
    #[error("the bias of weight row {row} is NaN or +inf")]
    BiasValue {
        /// The weight row.
        row: usize,
    },
    /// `scale` and `soft_cap` must be finite and positive.
    #[error("{what} = {value} cannot be used")]
    Factor {
        /// The name of the factor.
        what: &'static str,
        /// The factor's value.
        value: KnobValue,
    },
    /// The number of tokens to use is zero, or larger than the head's vocabulary.
    #[error("vocab_size is {vocab_size}, but the head's vocabulary has {most} tokens: it must be 1 to {most}")]
    VocabSize {
        /// The tokens to use.
        vocab_size: usize,
        /// The tokens of the head.
        most: usize,
    },
    /// A vocabulary has no tokens, or more than 2^32 - 2, or a row's id exceeds this limit. Samplers that allow no rows
    /// beyond the vocabulary also refuse a vocabulary with fewer tokens than rows.
    #[error("{}", wrong_vocab(*vocab_size, *vocab_start, *vocab_end))]
    Vocab {
        /// The vocabulary's size.
        vocab_size: usize,
        /// First global token of the weight.
        vocab_start: usize,
        /// One past the last global token of the weight.
        vocab_end: usize,
    },
}

fn wrong_vocab(vocab_size: usize, vocab_start: usize, vocab_end: usize) -> String {
    // `Winner::NONE` has the largest id.
    let most = u32::MAX as usize - 1;
    match () {
        () if vocab_size == 0 => "a vocabulary of 0 tokens has none to draw".into(),
        () if vocab_size > most => format!("a vocabulary of {vocab_size} tokens is too large: {most} are the most"),
        () => {
            // Rows beyond the vocabulary are padding, and still have ids.
            let limit = if vocab_end > most { most } else { vocab_size };
            format!("the weight's rows are tokens {vocab_start}..{vocab_end}, but must end at {limit} at most")
        }
    }
}

/// The value of a knob or of a factor. Floats compare by their bits, so that errors can be compared.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum KnobValue {
    /// A float.
    Float(f32),
    /// An integer.
    Integer(u64),
}

impl PartialEq for KnobValue {
    fn eq(&self, other: &KnobValue) -> bool {
        match (self, other) {
            (KnobValue::Float(a), KnobValue::Float(b)) => a.to_bits() == b.to_bits(),
            (KnobValue::Integer(a), KnobValue::Integer(b)) => a == b,
            _ => false,
        }
    }
}

impl Eq for KnobValue {}

impl From<f32> for KnobValue {
    fn from(value: f32) -> Self {
        KnobValue::Float(value)
    }
}

impl From<u64> for KnobValue {
    fn from(value: u64) -> Self {
        KnobValue::Integer(value)
    }
}

impl fmt::Display for KnobValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // Debug output has an exponent if that is shorter.
            KnobValue::Float(value) => fmt::Debug::fmt(value, f),
            KnobValue::Integer(value) => value.fmt(f),
        }
    }
}
