//! Log-probabilities and kept tokens of calls that do not wait, from the logits of the call in device memory.

use crate::abi::{
    self, DeviceAddress, FilterCall, KeptCall, KeptColumns, KeptToken, LogprobCall, LogprobColumns, PART_MASSES_BYTES,
    RowSummaries, SUMMARY_LISTED, SUMMARY_TOKENS, StoredLogits, SummaryRequest, SummaryResult, TOP_N_MAX, TokenColumns,
};
use crate::compile::{KernelSource, kernels};
use crate::device::{ConfiguredKernel, Device, Grid, Kernel, Queue, Scratch, check_aligned, entries};
use crate::error::CudaError;
use crate::selection::stored_kernels::SummaryKernels;
use flash_sampling_core::DType;
use flash_sampling_core::backend::MassHistogram;
use std::sync::Arc;

pub(crate) static SOURCE: KernelSource = KernelSource::single_cold("row_logprobs.cu", kernels::any);

impl LogprobColumns {
    /// Whether any result is requested.
    fn is_any(&self) -> bool {
        let of_draw = !self.log_z.is_null() || !self.log_probs.is_null() || !self.ranks.is_null();
        of_draw || self.token_count > 0 || self.top_n > 0
    }

    fn check(&self) -> Result<(), CudaError> {
        check_aligned("log Z", self.log_z)?;
        check_aligned("log-probabilities", self.log_probs)?;
        check_aligned("ranks", self.ranks)?;
        check_aligned("most probable tokens", self.top_tokens)?;
        check_aligned("log-probabilities of most probable tokens", self.top_log_probs)?;
        check_aligned("tokens with log-probabilities", self.token_ids)?;
        check_aligned("log-probabilities of tokens", self.token_log_probs)?;
        if self.token_count > 0 && (self.token_ids.is_null() || self.token_log_probs.is_null()) {
            let reason = "token_count is not 0, but token_ids or token_log_probs is null";
            return Err(CudaError::Layout { what: "tokens with log-probabilities", reason });
        }
        CudaError::check_limits(&[("most probable tokens of a row", self.top_n as usize, TOP_N_MAX as usize)])
    }
}

impl TokenColumns {
    /// Whether the results need the logits of the call in device memory.
    pub(crate) fn needs_logits(&self) -> bool {
        self.processed.is_any() || self.raw.is_any() || !self.kept.begin.is_null()
    }

    /// Checks the arrays of log-probabilities and kept tokens.
    pub(crate) fn check_logprobs(&self) -> Result<(), CudaError> {
        self.processed.check()?;
        self.raw.check()?;
        let KeptColumns { begin, tokens, .. } = self.kept;
        check_aligned("kept tokens", begin)?;
        check_aligned("kept tokens", tokens)?;
        if begin.is_null() && !tokens.is_null() {
            return Err(CudaError::Layout { what: "kept tokens", reason: "begin is null, but tokens is not" });
        }
        Ok(())
    }
}

/// The kernels for log-probabilities and kept tokens, and memory for the rows of a launch.
#[derive(Debug)]
pub(crate) struct DeviceLogprobs {
    request: Kernel<(FilterCall, RowSummaries, DeviceAddress<SummaryRequest>)>,
    summaries: SummaryKernels,
    logprobs: ConfiguredKernel<(LogprobCall,)>,
    write_kept: ConfiguredKernel<(KeptCall,)>,
    /// The weights of the mass bins, for log Z of rows with filters.
    weights: Scratch,
    memory: Scratch,
    max_rows: usize,
    tokens: usize,
}

/// The addresses of the arrays in the memory of a launch: inputs and results of the row summaries, with the number of
/// tokens before the drawn one (`before`), the lowest kept place (`least`) and the number of kept tokens (`kept`) of each
/// row.
struct Parts {
    results: DeviceAddress<SummaryResult>,
    requests: DeviceAddress<SummaryRequest>,
    top: DeviceAddress<KeptToken>,
    listed: DeviceAddress<KeptToken>,
    masses: DeviceAddress<u8>,
    least: DeviceAddress<u64>,
    listed_counts: DeviceAddress<u32>,
    before: DeviceAddress<u32>,
    kept: DeviceAddress<u32>,
}

impl DeviceLogprobs {
    /// Loads the kernels, and allocates memory for up to `max_rows` rows of `tokens` tokens: about 150 KB a row.
    pub(crate) fn new(max_rows: usize, tokens: usize, device: &Arc<Device>) -> Result<Self, CudaError> {
        let lists = (TOP_N_MAX as usize + SUMMARY_LISTED) * size_of::<KeptToken>();
        let masses = tokens.div_ceil(SUMMARY_TOKENS) * PART_MASSES_BYTES;
        let row = size_of::<SummaryResult>() + size_of::<SummaryRequest>() + lists + masses + 8 + 3 * 4;
        Ok(DeviceLogprobs {
            request: device.function(&SOURCE, &SOURCE.instance(), &entries::REQUEST_SUMMARIES)?,
            summaries: SummaryKernels::load(device)?,
            logprobs: ConfiguredKernel::load(device, &SOURCE, &entries::ROW_LOGPROBS)?,
            write_kept: ConfiguredKernel::load(device, &SOURCE, &entries::WRITE_KEPT)?,
            weights: Scratch::of(MassHistogram::weights(), device)?,
            memory: Scratch::new(row * max_rows, &[], device)?,
            max_rows,
            tokens,
        })
    }

    fn parts(&mut self) -> Parts {
        let n = self.max_rows;
        let results = self.memory.begin_use::<SummaryResult>();
        let top = results.add(n).cast::<KeptToken>();
        let listed = top.add(n * TOP_N_MAX as usize);
        let masses = listed.add(n * SUMMARY_LISTED).cast::<u8>();
        let least = masses.add(n * self.tokens.div_ceil(SUMMARY_TOKENS) * PART_MASSES_BYTES).cast::<u64>();
        let listed_counts = least.add(n).cast::<u32>();
        let (before, kept) = (listed_counts.add(n), listed_counts.add(2 * n));
        let requests = kept.add(n).cast();
        Parts { results, requests, top, listed, masses, least, listed_counts, before, kept }
    }

    /// Enqueues the results for the rows of a launch, which begin at row `first_row` of the call.
    ///
    /// `call` is the argument of the kernels for filters, which were enqueued before. If the raw law is requested, the
    /// logits of `call` are raw.
    pub(crate) fn enqueue(
        &mut self,
        queue: Queue<'_>,
        call: &FilterCall,
        invalid: DeviceAddress<u32>,
        (out, first_row): (&TokenColumns, usize),
    ) -> Result<(), CudaError> {
        let has_kept = !out.kept.begin.is_null();
        let Parts { least, kept, .. } = self.parts();
        if out.processed.is_any() || has_kept {
            let kept = if has_kept { kept } else { DeviceAddress::NULL };
            self.enqueue_law(queue, call, (invalid, kept), (&out.processed, first_row, out.is_complete))?;
        }
        if out.raw.is_any() {
            let raw = FilterCall { filters: DeviceAddress::NULL, is_transformed: 1, ..*call };
            self.enqueue_law(queue, &raw, (invalid, DeviceAddress::NULL), (&out.raw, first_row, out.is_complete))?;
        }
        if !has_kept {
            return Ok(());
        }
        let (filtered, columns, first_row) = (*call, out.kept, first_row as u32);
        self.write_kept.launch(queue, call.count, (KeptCall { filtered, least, kept, columns, first_row, padding: 0 },))
    }

    /// Enqueues the log-probabilities of one law and, if `kept` is not null, the counts of kept tokens.
    fn enqueue_law(
        &mut self,
        queue: Queue<'_>,
        call: &FilterCall,
        (invalid, kept): (DeviceAddress<u32>, DeviceAddress<u32>),
        (columns, first_row, is_complete): (&LogprobColumns, usize, u32),
    ) -> Result<(), CudaError> {
        let weights = self.weights.begin_use();
        let Parts { results, requests, top, listed, masses, least, listed_counts, before, .. } = self.parts();
        if columns.is_any() {
            let FilterCall { logits, row_stride, first_token, tokens, .. } = *call;
            let summaries = RowSummaries {
                stored: StoredLogits { logits, row_stride, first_token, tokens },
                raw: logits.cast(),
                sources: DeviceAddress::NULL,
                rows: if call.is_transformed == 1 { DeviceAddress::NULL } else { call.rows },
                requests,
                results,
                top,
                words: DeviceAddress::NULL,
                parts: masses,
                listed: listed.cast(),
                listed_counts,
                weights,
                raw_stride: row_stride,
                element: abi::element(DType::F32),
                top_stride: columns.top_n,
                before: if columns.ranks.is_null() { DeviceAddress::NULL } else { before },
            };
            queue.launch(&self.request, Grid::of(1, call.count), (*call, summaries, requests))?;
            self.summaries.launch(queue, summaries, call.count)?;
        }
        let call = LogprobCall {
            filtered: *call,
            invalid,
            weights,
            summaries: results,
            top,
            before,
            least,
            kept,
            columns: *columns,
            first_row: first_row as u32,
            is_complete,
        };
        self.logprobs.launch(queue, call.filtered.count, (call,))
    }
}
