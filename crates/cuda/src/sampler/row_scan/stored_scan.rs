//! Summaries of rows from stored logits, on the GPU, with the bits of core's `RowSummary::of`.
//!
//! | part of a summary | kernel | copied to the host |
//! | --- | --- | --- |
//! | draws | the fused kernel (first draw), `standalone.cu`; canonical: `near_ties.cu`, `canonical.cu` | 16 bytes each |
//! | largest logits | `row_summary.cu`; long lists: `top_list.cu` | 16 bytes each |
//! | draws without replacement | `top_list.cu` | 16 bytes each |
//! | tokens above a cutoff | `stored_scan.cu` | 16 bytes each |
//! | log Z | `row_summary.cu` | 16 bytes |
//! | masses, also of raw logits | `row_summary.cu` | 513 words of 8 bytes |
//! | moments | `stored_scan.cu` | 9 words |
//! | frontier of a draw | `stored_scan.cu` lists a few of each 4096 tokens; the host selects the frontier | 16 bytes each |
//! | prefix mass or prefix count of a rank | `stored_scan.cu` | one word |
//!
//! If filters precede the temperature and its reciprocal exceeds float32, the host copies and summarizes the row.

use crate::abi::{Draw, Item, Row, SumQuery, SummaryRequest};
use crate::error::CudaError;
use crate::sampler::row_scan::candidate;
use crate::selection::queries::{CanonicalInputs, Kind, Query, QueryResults};
use crate::selection::stored_rows::{LONGEST_LIST, StoredRows};
use cudarc::driver::CudaStream;
use flash_sampling_core::backend::selection::{PrefixMass, SummarySpec};
use flash_sampling_core::backend::{Candidate, Filters, MassHistogram, Moments, Request, RowScoreBound, RowSummary};
use flash_sampling_core::{RowParams, backend};
use std::sync::Arc;

/// The maximum number of draws in a batch of queries.
const DRAWS: usize = 4096;

/// A row of a pass.
#[derive(Debug)]
pub(crate) struct ScanRow<'a> {
    /// The row's index in the call.
    pub(crate) at: usize,
    /// The row's index among the stored rows.
    pub(crate) slot: usize,
    pub(crate) params: &'a RowParams<'a>,
    pub(crate) row: backend::Row<'a>,
    pub(crate) request: Request<'a>,
    /// Whether a row without filters is drawn from stored logits.
    pub(crate) draws: bool,
    /// Whether a row without filters gets log Z without masses.
    pub(crate) finishes_log_z: bool,
    /// The error bound of the row's scores, in a canonical plan.
    pub(crate) bound: Option<RowScoreBound>,
    pub(crate) out: &'a mut RowSummary,
}

impl ScanRow<'_> {
    /// Whether the row has raw log-probabilities.
    pub(crate) fn is_raw(&self) -> bool {
        self.row.raw_logprobs.is_some()
    }

    fn is_overview(&self) -> bool {
        self.out.error.is_none() && self.request.is_overview()
    }

    /// The filters of the row, if the GPU summarizes the row.
    fn filters(&self) -> Option<&Filters> {
        self.row.filters.as_ref().filter(|filters| self.out.error.is_none() && filters.rescale.is_finite())
    }

    /// The parts of the row's overview, if the row has filters.
    fn overview(&self) -> Option<(SummarySpec, &Filters)> {
        let filters = self.filters().filter(|_| self.request.is_overview())?;
        Some((SummarySpec::of(&self.row, filters), filters))
    }

    fn needs_mass(&self) -> bool {
        match self.row.filters {
            Some(_) => self.overview().is_some_and(|(spec, _)| spec.mass),
            None => !self.finishes_log_z && self.is_overview() && self.row.logprobs.is_some(),
        }
    }

    fn needs_log_z(&self) -> bool {
        self.finishes_log_z && self.row.filters.is_none() && self.is_overview() && self.row.logprobs.is_some()
    }

    /// The number of largest logits in an overview.
    fn list_len(&self) -> Option<u32> {
        match self.row.filters {
            Some(_) => self.overview().map(|(spec, _)| spec.list as u32),
            None => self.row.logprobs.filter(|&most| most > 0 && self.is_overview()),
        }
    }

    /// Whether the row needs draws with replacement and has no filters.
    fn needs_draws(&self) -> bool {
        self.draws && self.row.filters.is_none() && !self.row.without_replacement && self.is_overview()
    }

    /// The number of draws to compute: one for a greedy row, which copies this draw.
    fn made_draws(&self) -> u32 {
        if self.row.greedy { 1 } else { self.row.draws }
    }

    /// The results that the storing pass computes for this row. With `has_draw`, that pass also makes the first draw.
    pub(crate) fn summary_request(&self, is_raw: bool, has_draw: bool) -> SummaryRequest {
        let most = if is_raw { self.row.raw_logprobs.filter(|_| self.is_overview()) } else { self.list_len() };
        let limit = most.filter(|&most| most <= LONGEST_LIST).unwrap_or(0);
        let is_done = has_draw && self.needs_draws() && self.made_draws() == 1;
        let has_tokens = self.row.ranks || !self.row.logprob_token_ids.is_empty();
        let draws = self.draws && !is_done;
        let reads_logits = !self.is_overview() || self.row.filters.is_some() || draws || has_tokens;
        let masses = if is_raw { self.is_raw() && self.is_overview() } else { self.needs_mass() };
        SummaryRequest { limit, stores: (is_raw || reads_logits).into(), masses: masses.into(), padding: 0 }
    }

    /// Takes the draw of the storing pass, if the row needs no other draw.
    pub(crate) fn take_draw(&mut self, draw: &Draw) {
        if self.needs_draws() && self.made_draws() == 1 {
            let copies = self.row.draws as usize;
            self.out.draws.extend(candidate(draw).into_iter().flat_map(|best| core::iter::repeat_n(best, copies)));
        }
    }

    /// The kernels' parameters of a row, without transforms: stored logits are already transformed.
    fn noise(&self, draw: u32) -> Row {
        let (seed, position, greedy) = (self.params.seed, self.params.position, self.row.greedy.into());
        Row { seed, position, inv_temperature: 1.0, draw, greedy, ..Row::default() }
    }

    /// A query for the `limit` tokens with the best scores; with [`BY_LOGIT`], the tokens with the largest logits.
    fn best(&self, limit: u32, noise: Row) -> Query {
        let slack = match self.bound.map_or(0.0, |bound| bound.slack()) {
            f32::MAX => f32::INFINITY,
            slack => slack,
        };
        Query { item: Item { source: self.slot as u32, limit, slack, padding: 0 }, noise }
    }
}

/// Row parameters without noise, for lists of the largest logits.
const BY_LOGIT: fn() -> Row = || Row { inv_temperature: 1.0, greedy: 1, ..Row::default() };

/// Memory for queries, reused between calls.
#[derive(Debug, Default)]
pub(crate) struct StoredQueries {
    /// The queries, and the index of each query's member.
    queries: Vec<Query>,
    members: Vec<usize>,
    /// The tokens of logits to read.
    tokens: Vec<u32>,
    sums: Vec<SumQuery>,
    results: QueryResults,
    /// The result of a repeated query.
    repeated: QueryResults,
}

impl StoredQueries {
    fn clear(&mut self) {
        self.queries.clear();
        self.members.clear();
    }

    fn push(&mut self, member: usize, query: Query) {
        self.queries.push(query);
        self.members.push(member);
    }
}

/// Summarizes rows from their stored logits.
#[derive(Debug)]
pub(crate) struct StoredScan<'s, 'a> {
    part: &'s mut [ScanRow<'a>],
    memory: &'s mut StoredQueries,
    stored: &'s mut StoredRows,
    canonical: Option<&'s CanonicalInputs>,
    stream: &'s Arc<CudaStream>,
}

impl<'s, 'a> StoredScan<'s, 'a> {
    /// A scan of the stored rows of `part`. A canonical plan needs `canonical`, the inputs of the logits.
    pub(crate) fn new(
        part: &'s mut [ScanRow<'a>],
        memory: &'s mut StoredQueries,
        stored: &'s mut StoredRows,
        canonical: Option<&'s CanonicalInputs>,
        stream: &'s Arc<CudaStream>,
    ) -> Self {
        StoredScan { part, memory, stored, canonical, stream }
    }

    /// Summarizes rows from their transformed logits.
    pub(crate) fn find(&mut self) -> Result<(), CudaError> {
        let first = self.stored.tokens().start;
        for member in self.part.iter_mut().filter(|member| member.out.error.is_none()) {
            if member.row.filters.is_some_and(|filters| !filters.rescale.is_finite()) {
                let logits = self.stored.read(member.slot, self.stream)?;
                member.out.of(&member.row, member.request, first, logits);
            }
        }
        self.find_draws()?;
        self.find_lists()?;
        self.find_masses(|member| member.needs_mass(), |out| &mut out.mass)?;
        for member in self.part.iter_mut().filter(|member| member.needs_log_z()) {
            member.out.log_mass = Some(self.stored.log_mass(member.slot)?.value());
        }
        self.find_moments()?;
        self.find_frontiers()?;
        self.find_prefix_masses()?;
        self.find_tokens()
    }

    /// Draws for rows without filters. A greedy row copies one draw.
    fn find_draws(&mut self) -> Result<(), CudaError> {
        let write = |member: &mut ScanRow<'_>, best: &[Candidate]| {
            let copies = member.row.draws / member.made_draws();
            member.out.draws.extend(best.iter().flat_map(|&best| core::iter::repeat_n(best, copies as usize)));
        };
        self.memory.clear();
        for m in 0..self.part.len() {
            let member = &self.part[m];
            let draws = if member.needs_draws() && member.out.draws.is_empty() { member.made_draws() } else { 0 };
            for draw in (member.row.first_draw..).take(draws as usize) {
                let member = &self.part[m];
                self.memory.push(m, member.best(1, member.noise(draw)));
                if self.memory.queries.len() == DRAWS {
                    self.run_queries(Kind::Draws, write)?;
                }
            }
        }
        self.run_queries(Kind::Draws, write)
    }

    fn find_lists(&mut self) -> Result<(), CudaError> {
        self.query(|member| {
            let row = &member.row;
            let is_list = member.draws && row.without_replacement && row.filters.is_none() && member.is_overview();
            is_list.then(|| member.best(row.draws, member.noise(row.first_draw)))
        });
        self.run_queries(Kind::Lists, |member, best| member.out.draws.extend_from_slice(best))?;
        self.find_largest(|member| member.list_len(), |out, c| out.list.push(c))?;
        self.query(|member| match (member.request, member.filters()) {
            (Request::List { floor }, Some(_)) => {
                let item = Item { source: member.slot as u32, limit: u32::MAX, slack: floor, padding: 0 };
                Some(Query { item, noise: BY_LOGIT() })
            }
            _ => None,
        });
        self.run_queries(Kind::Above, |member, best| member.out.list.extend_from_slice(best))
    }

    /// Takes the largest logits from the storing pass. Queries list them if the list is too long, or in a canonical
    /// plan.
    fn find_largest(
        &mut self,
        len: impl Fn(&ScanRow<'_>) -> Option<u32>,
        push: fn(&mut RowSummary, Candidate),
    ) -> Result<(), CudaError> {
        self.memory.clear();
        for (m, member) in self.part.iter_mut().enumerate() {
            let Some(most) = len(member) else { continue };
            match self.stored.list(member.slot)?.filter(|_| member.bound.is_none()) {
                Some(list) => list.for_each(|c| push(member.out, c)),
                None => self.memory.push(m, member.best(most, BY_LOGIT())),
            }
        }
        if !self.memory.queries.is_empty() {
            self.stored.store_rest(self.stream)?;
        }
        self.run_queries(Kind::Lists, |member, best| best.iter().for_each(|&c| push(member.out, c)))
    }

    /// Copies the masses of rows.
    fn find_masses(
        &mut self,
        needs: impl Fn(&ScanRow<'_>) -> bool,
        place: fn(&mut RowSummary) -> &mut MassHistogram,
    ) -> Result<(), CudaError> {
        for member in self.part.iter_mut().filter(|member| needs(member)) {
            if !place(member.out).assign_words(self.stored.mass(member.slot)?) {
                return Err(CudaError::Corrupt { what: "masses" });
            }
        }
        Ok(())
    }

    fn find_moments(&mut self) -> Result<(), CudaError> {
        let (sums, members) = (&mut self.memory.sums, &mut self.memory.members);
        sums.clear();
        members.clear();
        for (m, member) in self.part.iter().enumerate() {
            let Some((_, filters)) = member.overview().filter(|(_, filters)| filters.need_moments()) else { continue };
            sums.push(SumQuery { source: member.slot as u32, value: filters.moments().scale(), ..SumQuery::default() });
            members.push(m);
        }
        if sums.is_empty() {
            return Ok(());
        }
        let tokens = self.stored.tokens().len() as u64;
        for (&m, words) in members.iter().zip(self.stored.moments(sums, self.stream)?) {
            let member = &mut self.part[m];
            let temperature = member.row.filters.map_or(1.0, |filters| filters.temperature);
            let moments = Moments::from_words(words, temperature, tokens);
            member.out.moments = moments.ok_or(CudaError::Corrupt { what: "moments" })?;
        }
        Ok(())
    }

    fn find_frontiers(&mut self) -> Result<(), CudaError> {
        self.memory.clear();
        for (m, member) in self.part.iter().enumerate() {
            let Some((spec, filters)) = member.overview() else { continue };
            let item = Item { source: member.slot as u32, limit: u32::MAX, ..Item::default() };
            let noise = Row { inv_temperature: filters.rescale, greedy: 0, ..member.noise(0) };
            let draws = member.row.first_draw..member.row.first_draw + spec.frontiers as u32;
            draws.for_each(|draw| self.memory.push(m, Query { item, noise: Row { draw, ..noise } }));
        }
        // The queries of a row are consecutive, in the order of its draws.
        let (mut last, mut number) = (usize::MAX, 0);
        self.run_queries(Kind::Frontiers, |member, points| {
            number = if last == member.at { number + 1 } else { 0 };
            last = member.at;
            let frontier = &mut member.out.frontiers_mut()[number];
            points.iter().for_each(|&point| frontier.push(point));
        })
    }

    fn find_prefix_masses(&mut self) -> Result<(), CudaError> {
        let (sums, members) = (&mut self.memory.sums, &mut self.memory.members);
        sums.clear();
        members.clear();
        for (m, member) in self.part.iter().enumerate().filter(|(_, member)| member.filters().is_some()) {
            let Request::PrefixMass { points, .. } = member.request else { continue };
            sums.extend(points.iter().map(|point| SumQuery::before(member.slot, &point.rank)));
            members.push(m);
        }
        if sums.is_empty() {
            return Ok(());
        }
        let mut masses = self.stored.prefix_masses(sums, self.stream)?.iter();
        for &m in &*members {
            let member = &mut self.part[m];
            let Request::PrefixMass { points, .. } = member.request else { continue };
            let known = points.iter().zip(&mut masses).map(|(point, &mass)| PrefixMass::with_mass(point.rank, mass));
            member.out.prefix_masses.extend(known);
        }
        Ok(())
    }

    /// Adds the requested results from stored raw logits.
    pub(crate) fn find_raw(&mut self) -> Result<(), CudaError> {
        let is_raw = |member: &ScanRow<'_>| member.is_raw() && member.is_overview();
        self.find_masses(is_raw, |out| out.raw_mass.get_or_insert_default())?;
        let raw_len = |member: &ScanRow<'_>| member.row.raw_logprobs.filter(|&most| most > 0 && member.is_overview());
        self.find_largest(raw_len, |out, c| out.raw_top.push(c))?;
        self.find_tokens()
    }

    /// Reads the requested logits, and counts the tokens before requested ranks.
    fn find_tokens(&mut self) -> Result<(), CudaError> {
        let (own, tokens) = (self.stored.tokens(), &mut self.memory.tokens);
        for member in self.part.iter_mut() {
            let Request::Logits { tokens: requested, .. } = member.request else { continue };
            tokens.clear();
            tokens.extend(requested.iter().filter(|token| own.contains(token)));
            let logits = self.stored.read_some(member.slot, tokens.iter().copied(), self.stream)?;
            member.out.logits.extend(tokens.iter().copied().zip(logits.iter().copied()));
        }
        let sums = &mut self.memory.sums;
        sums.clear();
        for member in &*self.part {
            let Request::PrefixCount { ranks, .. } = member.request else { continue };
            sums.extend(ranks.iter().map(|rank| SumQuery::before(member.slot, rank)));
        }
        if sums.is_empty() {
            return Ok(());
        }
        let mut counts = self.stored.prefix_counts(sums, self.stream)?.iter();
        for member in self.part.iter_mut() {
            let Request::PrefixCount { ranks, .. } = member.request else { continue };
            member.out.prefix_counts.extend(counts.by_ref().take(ranks.len()).map(|&count| count as u32));
        }
        Ok(())
    }

    /// Replaces the queries, with at most one query per row.
    fn query(&mut self, query: impl Fn(&ScanRow<'_>) -> Option<Query>) {
        self.memory.clear();
        for (m, member) in self.part.iter().enumerate() {
            if let Some(query) = query(member) {
                self.memory.push(m, query);
            }
        }
    }

    /// Runs all queries, writes each result to its row, and removes the queries.
    fn run_queries(
        &mut self,
        kind: Kind,
        mut write: impl FnMut(&mut ScanRow<'_>, &[Candidate]),
    ) -> Result<(), CudaError> {
        let StoredQueries { queries, members, results, repeated, .. } = &mut *self.memory;
        results.clear();
        self.stored.run_queries(kind, queries, self.canonical, results, self.stream)?;
        for (i, (&m, query)) in members.iter().zip(&*queries).enumerate() {
            let (member, mut best) = (&mut self.part[m], results.get(i));
            let last = best.last().map_or(0.0, |c| c.winner.score);
            if member.bound.is_some_and(|bound| bound.leaves_open(last)) {
                // The bounds excluded tokens that may be better, so the query is repeated over all tokens.
                let every = Query { item: Item { slack: f32::INFINITY, ..query.item }, ..*query };
                repeated.clear();
                self.stored.run_queries(kind, &[every], self.canonical, repeated, self.stream)?;
                best = repeated.get(0);
            }
            write(member, best);
        }
        self.memory.clear();
        Ok(())
    }
}
