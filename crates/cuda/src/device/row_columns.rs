//! Kernels and memory of calls whose parameters and results are in device memory ([`RowColumns`], [`TokenColumns`]).

use crate::abi::{DeviceAddress, Draw, EncodeRows, LogitBias, Row, RowColumns, RowFilters, TokenColumns, WriteTokens};
use crate::compile::{KernelSource, kernels};
use crate::device::{Device, Grid, Kernel, Queue, RowFeatures, Scratch, check_aligned, entries};
use crate::error::CudaError;
use crate::selection::{FilterKinds, FilteredRows};
use core::ops::Range;
use std::sync::Arc;

pub(crate) static SOURCE: KernelSource = KernelSource::single("row_columns.cu", kernels::any);

/// Threads of a block. A block encodes one row, or writes the results of `WRITE_THREADS` rows.
const ENCODE_THREADS: u32 = 512;
const WRITE_THREADS: u32 = 256;

impl RowColumns {
    /// The features of the rows, from the arrays that are present.
    pub(crate) fn features(&self) -> RowFeatures {
        let Self { logit_bias, banned, stop_tokens, .. } = self;
        let penalties = [self.repetition_penalty, self.frequency_penalty, self.presence_penalty];
        match () {
            // A mask may forbid most tokens.
            () if !self.mask.is_null() || penalties.iter().any(|column| !column.is_null()) => RowFeatures::Any,
            () if [logit_bias, banned, stop_tokens].iter().any(|lists| !lists.tokens.is_null()) => {
                RowFeatures::Unpenalised
            }
            () => RowFeatures::Bare,
        }
    }

    /// The kinds of filters, from the arrays that are present; `None` without filters.
    pub(crate) fn filter_kinds(&self) -> Option<FilterKinds> {
        let (top_p, others) = (!self.top_p.is_null(), !self.top_k.is_null() || !self.min_p.is_null());
        (top_p || others).then(|| FilterKinds::new(top_p, others, self.features()))
    }

    /// Checks what the kernels do not check: alignment, and arrays that need each other.
    pub(crate) fn check(&self) -> Result<(), CudaError> {
        let lists = [
            ("biases", self.logit_bias),
            ("banned tokens", self.banned),
            ("stop tokens", self.stop_tokens),
            ("prompts", self.prompt),
            ("outputs", self.output),
        ];
        for (what, lists) in lists {
            check_aligned(what, lists.begin)?;
            check_aligned(what, lists.end)?;
            check_aligned(what, lists.tokens)?;
            if !lists.tokens.is_null() && (lists.begin.is_null() || lists.end.is_null()) {
                return Err(CudaError::Layout { what, reason: "they have tokens without begin and end" });
            }
        }
        if self.logit_bias.tokens.is_null() != self.logit_bias_values.is_null() {
            return Err(CudaError::Layout { what: "biases", reason: "they need both tokens and values" });
        }
        check_aligned("seeds", self.seed)?;
        match self.has_short_positions {
            0 => check_aligned("positions", self.position)?,
            _ => check_aligned("positions", self.position.cast::<i32>())?,
        }
        check_aligned("masks", self.mask)?;
        for (what, column) in [("indices", self.index), ("top-k", self.top_k), ("min-tokens", self.min_tokens)] {
            check_aligned(what, column)?;
        }
        let floats = [
            ("temperatures", self.temperature),
            ("top-p", self.top_p),
            ("min-p", self.min_p),
            ("repetition penalties", self.repetition_penalty),
            ("frequency penalties", self.frequency_penalty),
            ("presence penalties", self.presence_penalty),
            ("biases", self.logit_bias_values),
        ];
        floats.into_iter().try_for_each(|(what, column)| check_aligned(what, column))
    }
}

impl TokenColumns {
    /// Checks the alignment of the arrays.
    pub(crate) fn check(&self) -> Result<(), CudaError> {
        check_aligned("tokens", self.tokens)?;
        check_aligned("scores", self.scores)?;
        check_aligned("logits", self.logits)?;
        check_aligned("statuses", self.statuses)?;
        self.check_logprobs()
    }
}

/// The kernels, and memory for up to `max_rows` rows.
#[derive(Debug)]
pub(crate) struct RowColumnKernels {
    encode: Kernel<(EncodeRows,)>,
    write: Kernel<(WriteTokens,)>,
    memory: Scratch,
    max_rows: usize,
    /// The maximum number of adjusted tokens of a row: tokens with a bias, a ban or a penalty.
    max_adjusted: usize,
}

/// The tokens of the lists of encoded rows.
#[derive(Clone, Debug)]
pub(crate) struct ListedTokens {
    /// The tokens of the head; or of all ranks, for the same lists on every rank.
    pub(crate) tokens: Range<u32>,
    pub(crate) vocab_size: u32,
    /// Whether to compute the [digests](RowColumnKernels::contents) of the rows.
    pub(crate) has_contents: bool,
    /// The largest top-k of rows with filters that lists of the largest logits may decide; `None` if there are no lists.
    /// See [`FilteredRows::passes`].
    pub(crate) largest_top_k: Option<u32>,
}

/// The addresses of the parts of the memory.
struct Parts {
    rows: FilteredRows,
    lists: DeviceAddress<LogitBias>,
    invalid: DeviceAddress<u32>,
    contents: DeviceAddress<u32>,
    counts: DeviceAddress<u32>,
    passes: DeviceAddress<u32>,
}

impl RowColumnKernels {
    /// Loads the kernels, and allocates memory: 20 bytes for each adjusted token of each row.
    ///
    /// # Errors
    /// [`CudaError::TooLarge`]: 2^30 adjusted tokens or more. [`CudaError::Compile`], [`CudaError::Driver`].
    pub(crate) fn new(max_rows: usize, max_adjusted: usize, device: &Arc<Device>) -> Result<Self, CudaError> {
        CudaError::check_limits(&[("adjusted tokens of a row", max_adjusted, (1 << 30) - 1)])?;
        let row = size_of::<Row>() + size_of::<RowFilters>() + size_of::<Draw>() + 4 + 4 + 4 * max_adjusted;
        let lists = size_of::<LogitBias>() * (2 * max_adjusted + 1);
        let passes = (row + lists) * max_rows;
        Ok(RowColumnKernels {
            encode: device.function(&SOURCE, &SOURCE.instance(), &entries::ENCODE_ROWS)?,
            write: device.function(&SOURCE, &SOURCE.instance(), &entries::WRITE_TOKENS)?,
            memory: Scratch::new(passes + 4, core::slice::from_ref(&(passes..passes + 4)), device)?,
            max_rows,
            max_adjusted,
        })
    }

    pub(crate) fn max_adjusted(&self) -> usize {
        self.max_adjusted
    }

    /// The addresses of numbers that are 0 for encoded rows with valid parameters.
    pub(crate) fn invalid(&mut self) -> DeviceAddress<u32> {
        self.parts().invalid
    }

    /// The addresses of digests of masks, lists, penalties and filters, for the encoded rows.
    pub(crate) fn contents(&mut self) -> DeviceAddress<u32> {
        self.parts().contents
    }

    fn parts(&mut self) -> Parts {
        let (n, rows) = (self.max_rows, self.memory.begin_use::<Row>());
        let filters = rows.add(n).cast::<RowFilters>();
        let lists = filters.add(n).cast::<LogitBias>();
        let draws = lists.add(n * (2 * self.max_adjusted + 1)).cast::<Draw>();
        let invalid = draws.add(n).cast::<u32>();
        let contents = invalid.add(n);
        let (counts, passes) = (contents.add(n), contents.add(n * (1 + self.max_adjusted)));
        let rows = FilteredRows::new(rows, filters, draws);
        Parts { rows, lists, invalid, contents, counts, passes }
    }

    /// Enqueues the launches of a call of `count` rows, each of up to `most` rows. `draw` enqueues the draws of some
    /// encoded rows.
    pub(crate) fn enqueue(
        &mut self,
        queue: Queue<'_>,
        (columns, out): (&RowColumns, &TokenColumns),
        (count, most): (usize, usize),
        listed: &ListedTokens,
        mut draw: impl FnMut(Range<usize>, FilteredRows) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let (most, begin) = (self.max_rows.min(most), out.kept.begin);
        // Without rows, no launch writes the end of the lists.
        if count == 0 && !begin.is_null() {
            queue.fill(begin, 0, 1)?;
        }
        for first in (0..count).step_by(most) {
            let rows = first..count.min(first + most);
            let encoded = self.encode(queue, columns, rows.clone(), listed)?;
            draw(rows.clone(), encoded)?;
            self.write(queue, out, rows)?;
        }
        Ok(())
    }

    /// Enqueues the encoding of up to `max_rows` rows, with the adjusted tokens among these tokens.
    ///
    /// A row with an invalid parameter becomes a greedy row without filters. Returns the addresses of the encoded rows,
    /// of their filters, and of the draws that the next kernel writes.
    fn encode(
        &mut self,
        queue: Queue<'_>,
        columns: &RowColumns,
        rows: Range<usize>,
        listed: &ListedTokens,
    ) -> Result<FilteredRows, CudaError> {
        CudaError::check_limits(&[("rows", rows.len(), self.max_rows), ("rows", rows.end, i32::MAX as usize)])?;
        let Parts { rows: encoded, lists, invalid, contents, counts, passes } = self.parts();
        let ListedTokens { tokens, vocab_size, has_contents, largest_top_k } = listed;
        let passes = if largest_top_k.is_some() { passes } else { DeviceAddress::NULL };
        let encoded = FilteredRows { passes, ..encoded };
        let call = EncodeRows {
            columns: *columns,
            rows: encoded.rows,
            filters: encoded.filters,
            invalid,
            lists,
            counts,
            first_row: rows.start as u32,
            max_adjusted: self.max_adjusted as u32,
            first_token: tokens.start,
            tokens: tokens.len() as u32,
            vocab_size: *vocab_size,
            largest_top_k: largest_top_k.unwrap_or(0),
            contents: if *has_contents { contents } else { DeviceAddress::NULL },
            passes: encoded.passes,
        };
        queue.launch(&self.encode, Grid::of(rows.len() as u32, ENCODE_THREADS), (call,))?;
        Ok(encoded)
    }

    /// Enqueues the write of the results of the encoded rows, after their draws.
    fn write(&mut self, queue: Queue<'_>, columns: &TokenColumns, rows: Range<usize>) -> Result<(), CudaError> {
        let Parts { rows: FilteredRows { draws, .. }, invalid, passes, .. } = self.parts();
        let (first_row, row_count) = (rows.start as u32, rows.len() as u32);
        let call = WriteTokens { columns: *columns, draws, invalid, first_row, row_count, passes };
        queue.launch(&self.write, Grid::of(row_count.div_ceil(WRITE_THREADS), WRITE_THREADS), (call,))
    }
}

#[cfg(test)]
mod tests;
