//! Calls of ranks that do not wait: hidden states, parameters and results are in device memory, and the GPUs exchange
//! the draws.
//!
//! Every rank encodes the rows with the adjusted tokens of the whole vocabulary. So a row with too many adjusted tokens
//! is invalid on all ranks, and the encoded rows, which the exchange compares, do not depend on the shard.

use super::HeadSampler;
use crate::abi::{RowColumns, TokenColumns};
use crate::device::row_features::RowFeatures;
use crate::error::CudaError;
use crate::exchange::cuda_exchange::{CudaExchange, number_of};
use crate::sampler::column_call::ColumnCall;
use cudarc::driver::CudaStream;
use flash_sampling_core::backend::digest::of_words;
use flash_sampling_core::{DType, Knob};

/// The first word of the marks of these calls, which differ from the marks of calls that wait.
const MARK: u64 = u64::from_le_bytes(*b"enqueue\0");

impl HeadSampler<'_> {
    /// Loads kernels and allocates memory for later calls of [`HeadSampler::enqueue_sharded`], with up to `max_adjusted`
    /// adjusted tokens in a row.
    pub(crate) fn prepare_sharded_columns(
        &mut self,
        exchange: &CudaExchange,
        max_adjusted: usize,
    ) -> Result<(), CudaError> {
        if let Some(kernels) = &mut self.kernels {
            kernels.fused.prepare(RowFeatures::Any)?;
            if exchange.is_by_peers() {
                kernels.fused.prepare_fan_out()?;
            }
        }
        self.reserve_columns(max_adjusted)
    }

    /// Checks that ranks support the parameters and results of a call.
    pub(crate) fn check_sharded_columns(&self, call: &ColumnCall<'_>) -> Result<(), CudaError> {
        let (columns, out) = (call.columns(), call.out());
        let unsupported = [(self.plan.canonical, Knob::Canonical)].into_iter().chain(whole_row(columns, out));
        match unsupported.into_iter().find(|(is_present, _)| *is_present) {
            Some((_, knob)) => Err(CudaError::NotEnqueued { knob }),
            None => Ok(()),
        }
    }

    /// Enqueues one draw from the whole vocabulary for each row of the hidden states, in launches of at most 256 rows.
    pub(crate) fn enqueue_sharded(
        &mut self,
        exchange: &mut CudaExchange,
        call: &ColumnCall<'_>,
    ) -> Result<(), CudaError> {
        let (hidden, columns, out) = (call.hidden(), call.columns(), call.out());
        self.check_sharded_columns(call)?;
        columns.check()?;
        out.check()?;
        self.check_gpus(exchange, call.queue().stream())?;
        CudaError::check_limits(&[("rows", hidden.rows, self.plan.max_rows)])?;
        if hidden.cols != self.shape.input {
            return Err(CudaError::Layout { what: "hidden states", reason: "their width is not that of the weight" });
        }
        if self.columns.is_none() {
            self.prepare_sharded_columns(exchange, 0)?;
        }
        let (vocab_size, features) = (self.shape.vocab_size, columns.features());
        let (Some(encoder), kernels) = (&mut self.columns, &mut self.kernels) else { return Ok(()) };
        let (count, max_rows, max_adjusted) = (hidden.rows, exchange.max_rows(), encoder.max_adjusted());
        let whole = (0..vocab_size, vocab_size);
        encoder.enqueue(call.queue(), (columns, out), (count, max_rows), whole, |rows, encoded| {
            let mark = mark_of(columns, (hidden.dtype, max_adjusted), (rows.start, count));
            let (states, to) = (hidden.rows(rows.clone()), (encoded.rows, encoded.draws));
            let shard = kernels.as_mut().map(|kernels| (&mut kernels.fused, &states, features));
            exchange.enqueue(call.queue(), shard, (to, rows.len()), mark)
        })
    }

    fn check_gpus(&self, exchange: &CudaExchange, stream: &CudaStream) -> Result<(), CudaError> {
        let mine = self.stream.context().ordinal();
        match () {
            () if exchange.device().context().ordinal() != mine => {
                Err(CudaError::NotSharded { reason: "the exchange is of another GPU" })
            }
            () if stream.context().ordinal() != mine => {
                Err(CudaError::Layout { what: "hidden states", reason: "they are on another GPU" })
            }
            () => Ok(()),
        }
    }
}

/// The parameters and results that depend on all logits of a row, and so on all ranks; and whether a call has them.
fn whole_row(columns: &RowColumns, out: &TokenColumns) -> [(bool, Knob); 5] {
    [
        (!columns.top_k.is_null(), Knob::TopK),
        (!columns.top_p.is_null(), Knob::TopP),
        (!columns.min_p.is_null(), Knob::MinP),
        (!out.kept.begin.is_null(), Knob::Kept),
        (out.needs_logits(), Knob::Logprobs),
    ]
}

/// The mark of a launch, which differs if ranks have other arrays, hidden states of another type, other numbers of rows,
/// or another plan of adjusted tokens.
fn mark_of(columns: &RowColumns, (dtype, max_adjusted): (DType, usize), (first, count): (usize, usize)) -> u64 {
    let words = [MARK, number_of(dtype).into(), max_adjusted as u64, first as u64, count as u64];
    of_words(words.into_iter().chain([presence(columns), columns.mask_words.into()]))
}

/// A bit for each array that is present.
fn presence(columns: &RowColumns) -> u64 {
    let &RowColumns { logit_bias, banned, stop_tokens, prompt, output, .. } = columns;
    let present = [
        columns.index.is_null(),
        columns.seed.is_null(),
        columns.position.is_null(),
        columns.temperature.is_null(),
        columns.repetition_penalty.is_null(),
        columns.frequency_penalty.is_null(),
        columns.presence_penalty.is_null(),
        columns.min_tokens.is_null(),
        columns.mask.is_null(),
        logit_bias.tokens.is_null(),
        banned.tokens.is_null(),
        stop_tokens.tokens.is_null(),
        prompt.tokens.is_null(),
        output.tokens.is_null(),
    ];
    present.into_iter().fold(0, |bits, is_null| bits << 1 | u64::from(!is_null))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{DeviceAddress, KeptColumns, LogprobColumns, TokenLists};

    #[test]
    fn marks_differ_if_calls_do() {
        let bare = RowColumns::default();
        let lists = TokenLists { tokens: DeviceAddress::new(4), ..TokenLists::default() };
        let marks = [
            mark_of(&bare, (DType::BF16, 0), (0, 9)),
            mark_of(&bare, (DType::F16, 0), (0, 9)),
            mark_of(&bare, (DType::BF16, 8), (0, 9)),
            mark_of(&bare, (DType::BF16, 0), (4, 9)),
            mark_of(&bare, (DType::BF16, 0), (0, 8)),
            mark_of(&RowColumns { seed: DeviceAddress::new(8), ..bare }, (DType::BF16, 0), (0, 9)),
            mark_of(&RowColumns { banned: lists, ..bare }, (DType::BF16, 0), (0, 9)),
            mark_of(&RowColumns { output: lists, ..bare }, (DType::BF16, 0), (0, 9)),
            mark_of(&RowColumns { mask_words: 4, ..bare }, (DType::BF16, 0), (0, 9)),
        ];
        for (i, mark) in marks.iter().enumerate() {
            assert!(!marks[..i].contains(mark), "{i}");
        }
    }

    /// Two ranks have the arrays of their own memory, at other addresses.
    #[test]
    fn marks_do_not_depend_on_addresses() {
        let at = |address| RowColumns { seed: DeviceAddress::new(address), ..RowColumns::default() };
        assert_eq!(mark_of(&at(8), (DType::BF16, 0), (0, 9)), mark_of(&at(64), (DType::BF16, 0), (0, 9)));
    }

    #[test]
    fn what_depends_on_the_whole_row_is_named() {
        let (int, float) = (DeviceAddress::new(4), DeviceAddress::new(4));
        let columns = RowColumns { top_k: int, top_p: float, min_p: float, ..RowColumns::default() };
        let named = |columns: &RowColumns, out: &TokenColumns| {
            let all = whole_row(columns, out).into_iter();
            all.filter(|(is_present, _)| *is_present).map(|(_, knob)| knob).collect::<Vec<_>>()
        };
        assert_eq!(named(&columns, &TokenColumns::default()), [Knob::TopK, Knob::TopP, Knob::MinP]);
        let raw = LogprobColumns { log_probs: float, ..LogprobColumns::default() };
        let kept = KeptColumns { begin: DeviceAddress::new(8), ..KeptColumns::default() };
        let none = RowColumns::default();
        assert_eq!(named(&none, &TokenColumns { raw, ..TokenColumns::default() }), [Knob::Logprobs]);
        assert_eq!(named(&none, &TokenColumns { kept, ..TokenColumns::default() }), [Knob::Kept, Knob::Logprobs]);
        assert_eq!(named(&none, &TokenColumns::default()), []);
    }
}
