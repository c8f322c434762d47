//! What the samplers over host memory share: checks, staging, launches, and results as core says them.

mod sharded;
mod stage;
mod stored_rows;
mod stored_scan;
mod survey;

use crate::abi::{Draw, RowFilters, status};
use crate::device::gpu::Device;
use crate::device::row_features::KernelChoice;
use crate::device::select::GroupRule;
use crate::device::stored_rows::StoredRows;
use crate::error::CudaError;
use crate::host::check_plan;
use crate::host::exchange::CudaExchange;
use crate::host::results::{note_tries, push_row};
use crate::host::staging::Staging;
use crate::host::stored_results::{StoredRequest, StoredResults};
use crate::host::uploaded_head::UploadedHead;
use cudarc::driver::CudaStream;
use flash_sampling_core::backend::SampledRows;
use flash_sampling_core::backend::error_bounds::ScoreBound;
use flash_sampling_core::sampler::check_call;
use flash_sampling_core::{
    Adjustments, Capabilities, Exactness, Head, Knobs, Matrix, Plan, RowParams, SampleError, Samples, Shape, params,
};
use stage::adjusted;
use std::sync::Arc;
use stored_scan::StoredScan;

/// The capabilities of a sampler under its plan.
pub(crate) fn planned(can: Capabilities, plan: &Plan) -> Capabilities {
    // Canonical logits are known of near ties alone.
    if plan.canonical { Capabilities { knobs: Knobs::ADJUSTMENTS, ..can } } else { can }
}

/// A call from host memory to host memory, whatever the variant: the public samplers are this, with what they can do.
#[derive(Debug)]
pub(crate) struct HostSampler<'w> {
    head: Head<'w>,
    plan: Plan,
    can: Capabilities,
    stream: Arc<CudaStream>,
    /// `None` for a head without tokens.
    resident: Option<UploadedHead>,
    staging: Staging,
    /// Row and number of each draw of the call.
    work: Vec<(usize, u32)>,
    /// The biases of a row, or for a survey of the call's rows.
    adjustments: Adjustments,
    /// The draws of the last launches, and of the call.
    draws: Vec<Draw>,
    results: Vec<Draw>,
    /// For the rows that ask for more, made when the first of them comes; and the bounds of a canonical plan.
    stored: Option<StoredRows>,
    error_bounds: Option<ScoreBound>,
    answers: StoredResults,
    /// For scans.
    finder: StoredScan,
    pub(crate) sampled: SampledRows,
    /// The rows of the call that ask, those of a launch, and a hidden state of them.
    asking: Vec<usize>,
    asked: Vec<StoredRequest>,
    hidden: Vec<f32>,
    /// The draws whose filters the GPU decides: row, number, filters; and what they came to.
    filtering: Vec<(usize, u32, RowFilters)>,
    filters: Vec<RowFilters>,
    filtered: Vec<Draw>,
    /// How many times each was tried.
    tried: Vec<u32>,
    /// Which of them are open.
    open: Vec<usize>,
}

impl<'w> HostSampler<'w> {
    /// Checks the plan, copies the weight, compiles and loads the kernels. Without `groups`, tokens of a group and how they
    /// draw, the draws are the tiled kernel's.
    pub(crate) fn new(
        head: Head<'w>,
        plan: Plan,
        can: Capabilities,
        device: &Arc<Device>,
        choice: KernelChoice,
        groups: Option<(u32, GroupRule)>,
    ) -> Result<Self, CudaError> {
        check_plan(&plan, can.canonical)?;
        let can = planned(can, &plan);
        let stream = device.stream()?;
        let resident = match head.tokens().is_empty() {
            true => None,
            false => Some(UploadedHead::new(&head, &plan, device, choice, groups, &stream)?),
        };
        Ok(HostSampler {
            staging: Staging::locked(head.tokens(), head.vocab_size(), &stream)?,
            head,
            plan,
            can,
            stream,
            resident,
            work: Vec::new(),
            adjustments: Adjustments::default(),
            draws: Vec::new(),
            results: Vec::new(),
            stored: None,
            error_bounds: plan.canonical.then(|| ScoreBound::new(&head)),
            answers: StoredResults::default(),
            finder: StoredScan::default(),
            sampled: SampledRows::default(),
            asking: Vec::new(),
            asked: Vec::new(),
            hidden: Vec::new(),
            filtering: Vec::new(),
            filters: Vec::new(),
            filtered: Vec::new(),
            tried: Vec::new(),
            open: Vec::new(),
        })
    }

    /// Makes every draw of `work`, in its order.
    fn draw(
        &mut self,
        input: &Matrix<'_>,
        rows: &[RowParams<'_>],
        mut exchange: Option<&mut CudaExchange>,
    ) -> Result<(), CudaError> {
        self.results.clear();
        let can = self.can_by(exchange.as_deref());
        let most = self.most_draws(exchange.as_deref());
        if self.resident.is_none() && exchange.is_none() {
            let nothing = Draw { status: status::NO_FINITE_LOGIT, ..Draw::default() };
            self.results.resize(self.work.len(), nothing);
            return Ok(());
        }
        for part in self.work.chunks(most) {
            self.staging.clear();
            for draws in part.chunk_by(|a, b| a.0 == b.0) {
                let r = draws[0].0;
                let row = adjusted(&rows[r], &mut self.adjustments, &self.head, (&can, &self.plan));
                self.staging.push_of(r, &rows[r], &row, draws.iter().map(|&(_, draw)| draw))?;
            }
            if exchange.is_some() {
                self.staging.expect_penalties_of(rows);
            }
            let (staging, draws, stream) = (&mut self.staging, &mut self.draws, &self.stream);
            let drawn = match (&mut self.resident, exchange.as_deref_mut()) {
                (Some(resident), exchange) => {
                    resident.draw(staging, input, draws, stream, exchange.map(|exchange| (exchange, rows)))
                }
                (None, Some(exchange)) => exchange.draw_nothing((staging.staged(), rows), draws, stream),
                (None, None) => Ok(()),
            };
            drawn.map_err(|error| of_call(error, |at| part[at].0))?;
            self.results.extend_from_slice(&self.draws);
        }
        Ok(())
    }

    /// Makes room for lists and masks of as many bytes.
    pub(crate) fn reserve_lists(&mut self, bytes: usize) -> Result<(), CudaError> {
        self.staging.reserve(bytes)?;
        self.resident.as_mut().map_or(Ok(()), |resident| resident.reserve_lists(bytes, &self.stream))
    }

    /// Draws of one launch: as many on every rank of an exchange, with tokens or without.
    fn most_draws(&self, exchange: Option<&CudaExchange>) -> usize {
        UploadedHead::most_of(&self.plan).min(exchange.map_or(usize::MAX, CudaExchange::max_rows))
    }

    /// What is done by this head alone, or by an exchange.
    fn can_by(&self, exchange: Option<&CudaExchange>) -> Capabilities {
        // Which tokens a filter keeps depends on the other ranks; what acts on single logits does not.
        let of_exchange = self.can.knobs.intersection(Knobs::ADJUSTMENTS);
        if exchange.is_some() { Capabilities { knobs: of_exchange, ..self.can } } else { self.can }
    }

    /// Whether a row is served from stored logits: all of a canonical plan, lists without replacement, log-probabilities of
    /// the law that is drawn from, filters.
    /// Draws of a sampler that is not pathwise are made by its own kernels all the same.
    fn asks(&self, row: &params::Row<'_>) -> bool {
        let asks = row.without_replacement || row.logprobs.is_some() || row.filters.is_some();
        self.resident.is_some() && (self.plan.canonical || asks)
    }

    fn draws_from_stored(&self) -> bool {
        self.can.exactness == Exactness::Pathwise
    }

    /// Whether rows without filters are drawn in one launch with those that have some: where lists decide, they cost no
    /// more there.
    fn draws_together(&self, input: &Matrix<'_>, rows: &[RowParams<'_>]) -> bool {
        let has_filters = |row: &RowParams<'_>| {
            let row = row.check(&[], &self.can, &self.plan, self.head.vocab_size());
            row.is_ok_and(|row| self.quick(&row).is_some_and(|filters| filters.is_listed()))
        };
        let lists = self.resident.as_ref().is_some_and(|resident| resident.lists(input));
        lists && self.draws_from_stored() && rows.iter().any(has_filters)
    }

    /// The filters of a row that the GPU decides: it draws and asks for nothing else.
    fn quick(&self, row: &params::Row<'_>) -> Option<RowFilters> {
        let draws_only = !row.kept && !row.without_replacement && row.logprobs.is_none() && self.resident.is_some();
        row.filters.as_ref().filter(|_| draws_only).and_then(RowFilters::of)
    }
}

impl HostSampler<'_> {
    pub(crate) fn capabilities(&self) -> Capabilities {
        self.can
    }

    pub(crate) fn shape(&self) -> Shape {
        Shape { tokens: self.head.tokens(), vocab_size: self.head.vocab_size(), input: self.head.hidden() }
    }

    pub(crate) fn plan(&self) -> Plan {
        self.plan
    }

    pub(crate) fn sample(
        &mut self,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> Result<(), SampleError> {
        self.sample_with(input, rows, out, None)
    }

    /// Samples from this head, or together with the other ranks of an exchange; these draw and nothing else.
    pub(crate) fn sample_with(
        &mut self,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        out: &mut Samples,
        exchange: Option<&mut CudaExchange>,
    ) -> Result<(), SampleError> {
        out.clear();
        check_call(&input, rows, &self.shape(), &self.plan)?;
        let can = self.can_by(exchange.as_deref());
        let together = exchange.is_none() && self.draws_together(&input, rows);
        self.divide(rows, &can, together);
        let failed = |error| SampleError::Backend { backend: "cuda", source: Box::new(error) };
        if exchange.is_some() && !self.asking.is_empty() {
            return Err(failed(CudaError::NotTogether { reason: "a row asks for more than draws" }));
        }
        self.draw(&input, rows, exchange).map_err(failed)?;
        self.filter(&input, rows).map_err(failed)?;
        self.ask(&input, rows).map_err(failed)?;
        self.emit(rows, &can, out);
        self.note_raw(&input, rows, out).map_err(|error| {
            out.clear();
            failed(error)
        })
    }

    /// Which draws of a call the fused kernel makes (`work`), which it makes with filters (`filtering`), and which rows ask
    /// (`asking`); with `together`, plain rows are filtered by filters that are off.
    fn divide(&mut self, rows: &[RowParams<'_>], can: &Capabilities, together: bool) {
        self.work.clear();
        self.asking.clear();
        self.filtering.clear();
        for (r, params) in rows.iter().enumerate() {
            let Ok(row) = params.check(&[], can, &self.plan, self.head.vocab_size()) else { continue };
            let plain = (together && !self.asks(&row)).then_some(RowFilters::OFF);
            if let Some(filters) = self.quick(&row).or(plain) {
                let draws = row.first_draw..row.first_draw + row.draws;
                self.filtering.extend(draws.map(|draw| (r, draw, filters)));
                continue;
            }
            let asks = self.asks(&row);
            if asks {
                self.asking.push(r);
            }
            if !asks || !self.draws_from_stored() {
                self.work.extend((row.first_draw..row.first_draw + row.draws).map(|draw| (r, draw)));
            }
        }
    }

    /// Each row's outcome, from what its draws and questions came to.
    fn emit(&mut self, rows: &[RowParams<'_>], can: &Capabilities, out: &mut Samples) {
        let vocab_size = self.head.vocab_size();
        let pathwise = self.draws_from_stored();
        let (mut results, mut asking) = (self.results.as_slice(), self.asking.iter().enumerate().peekable());
        let (mut filtered, mut filtering) = (self.filtered.as_slice(), self.filtering.iter().peekable());
        let mut tried = self.tried.as_slice();
        for (r, params) in rows.iter().enumerate() {
            let asked = asking.next_if(|(_, row)| **row == r).map(|(i, _)| i);
            let mut quick = 0;
            while filtering.next_if(|(row, ..)| *row == r).is_some() {
                quick += 1;
            }
            let (mut own, rest) = filtered.split_at(quick);
            filtered = rest;
            let (of_row, rest) = tried.split_at(quick);
            tried = rest;
            let outcome = params.check(&[], can, &self.plan, vocab_size).and_then(|row| match asked {
                Some(i) if pathwise => self.answers.emit(i, &row, vocab_size, out),
                None if quick > 0 => push_row(&mut own, &row, None, &[], out),
                asked => {
                    let (mass, top) = asked.map_or((None, [].as_slice()), |i| self.answers.extras(i));
                    push_row(&mut results, &row, mass, top, out)
                }
            });
            match outcome {
                Err(error) => out.push_error(error),
                Ok(()) => note_tries(of_row.iter().copied().max().unwrap_or(0), asked.is_some(), out),
            }
        }
    }
}

/// An error of a launch, which counts its own draws, as one of the call; `row_of` tells the row of a draw.
fn of_call(error: CudaError, row_of: impl Fn(usize) -> usize) -> CudaError {
    match error {
        CudaError::OtherCall { rank, row: Some(at) } => CudaError::OtherCall { rank, row: Some(row_of(at)) },
        error => error,
    }
}
