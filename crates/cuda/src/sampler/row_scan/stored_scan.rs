//! Summaries of rows from their stored logits, made on the GPU: those of core's `RowSummary::of`, bit for bit.
//!
//! | part of a summary | kernel | copied to the host |
//! | --- | --- | --- |
//! | draws | the fused kernel the first, `standalone.cu`, with canonical sums `near_ties.cu` and `canonical.cu` | 16 bytes each |
//! | largest logits | `row_summary.cu`, long lists `top_list.cu` | 16 bytes each |
//! | draws without replacement | `top_list.cu` | 16 bytes each |
//! | tokens from a floor on | `stored_scan.cu` | 16 bytes each |
//! | log Z | `row_summary.cu` | 16 bytes |
//! | masses, of raw logits too | `row_summary.cu` | 513 words of 8 bytes |
//! | moments | `stored_scan.cu` | 9 words |
//! | frontier of a draw | `stored_scan.cu`: a few tokens of each 4096, of which the host makes the frontier | 16 bytes each |
//! | mass or number of tokens before a rank | `stored_scan.cu` | one word |
//!
//! A row whose filters come before a temperature that takes logits beyond float32 is copied and summarized by the host.

use crate::abi::{Draw, Item, Row, SumQuery, SummaryRequest};
use crate::error::CudaError;
use crate::sampler::row_scan::candidate;
use crate::selection::queries::{CanonicalInputs, Kind, Query, QueryResults};
use crate::selection::stored_rows::{LONGEST_LIST, StoredRows};
use cudarc::driver::CudaStream;
use flash_sampling_core::backend::error_bounds::RowScoreBound;
use flash_sampling_core::backend::selection::{PrefixMass, SummarySpec};
use flash_sampling_core::backend::{Request, RowSummary};
use flash_sampling_core::{Candidate, Filters, MassHistogram, Moments, RowParams, params};
use std::sync::Arc;

/// Draws that are requested at a time.
const DRAWS: usize = 4096;

/// A row of a pass.
#[derive(Debug)]
pub(crate) struct ScanRow<'a> {
    /// Its index in the call, and among the stored rows.
    pub(crate) at: usize,
    pub(crate) slot: usize,
    pub(crate) params: &'a RowParams<'a>,
    pub(crate) row: params::Row<'a>,
    pub(crate) request: Request<'a>,
    /// Whether its draws are made from stored logits, if it has no filters.
    pub(crate) draws: bool,
    /// Whether it gets log Z in place of its masses, if it has no filters.
    pub(crate) finishes_log_z: bool,
    /// In a canonical plan.
    pub(crate) bound: Option<RowScoreBound>,
    pub(crate) out: &'a mut RowSummary,
}

impl ScanRow<'_> {
    /// Whether it has raw log-probabilities.
    pub(crate) fn is_raw(&self) -> bool {
        self.row.raw_logprobs.is_some()
    }

    fn is_overview(&self) -> bool {
        self.out.error.is_none() && self.request.is_overview()
    }

    /// The filters of a row that the GPU summarizes.
    fn filters(&self) -> Option<&Filters> {
        self.row.filters.as_ref().filter(|filters| self.out.error.is_none() && filters.rescale.is_finite())
    }

    /// The parts of an overview of a row with filters.
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

    /// Whether the draws of a row without filters are requested, and not as a list without replacement.
    fn needs_draws(&self) -> bool {
        self.draws && self.row.filters.is_none() && !self.row.without_replacement && self.is_overview()
    }

    /// The number of draws that are made: a greedy row makes one, and copies it.
    fn made_draws(&self) -> u32 {
        if self.row.greedy { 1 } else { self.row.draws }
    }

    /// What the pass that stores the row finds. `has_draw`: it makes the first draw, too.
    pub(crate) fn summary_request(&self, is_raw: bool, has_draw: bool) -> SummaryRequest {
        let most = if is_raw { self.row.raw_logprobs.filter(|_| self.is_overview()) } else { self.list_len() };
        let limit = most.filter(|&most| most <= LONGEST_LIST).unwrap_or(0);
        let is_done = has_draw && self.needs_draws() && self.made_draws() == 1;
        let has_tokens = self.row.ranks || !self.row.logprob_token_ids.is_empty();
        let reads_logits = self.row.filters.is_some() || (self.draws && !is_done) || has_tokens;
        let masses = if is_raw { self.is_raw() && self.is_overview() } else { self.needs_mass() };
        SummaryRequest { limit, stores: (is_raw || reads_logits).into(), masses: masses.into(), padding: 0 }
    }

    /// Takes the first draw of the row, if that is all it needs.
    pub(crate) fn take_draw(&mut self, draw: &Draw) {
        if self.needs_draws() && self.made_draws() == 1 {
            let copies = self.row.draws as usize;
            self.out.draws.extend(candidate(draw).into_iter().flat_map(|best| core::iter::repeat_n(best, copies)));
        }
    }

    /// Noise as the kernels take it, without the transforms, which are done.
    fn noise(&self, draw: u32) -> Row {
        let (seed, position, greedy) = (self.params.seed, self.params.position, self.row.greedy.into());
        Row { seed, position, inv_temperature: 1.0, draw, greedy, ..Row::default() }
    }

    /// The `limit` tokens with the best scores, or the largest logits.
    fn best(&self, limit: u32, noise: Row) -> Query {
        let slack = match self.bound.map_or(0.0, |bound| bound.slack()) {
            f32::MAX => f32::INFINITY,
            slack => slack,
        };
        Query { item: Item { source: self.slot as u32, limit, slack, padding: 0 }, noise }
    }
}

/// Noise for lists of the largest logits.
const BY_LOGIT: fn() -> Row = || Row { inv_temperature: 1.0, greedy: 1, ..Row::default() };

/// Memory for queries. Reused between calls.
#[derive(Debug, Default)]
pub(crate) struct StoredQueries {
    /// The queries, and the member that each is of.
    queries: Vec<Query>,
    members: Vec<usize>,
    /// The tokens whose logits are read.
    tokens: Vec<u32>,
    sums: Vec<SumQuery>,
    results: QueryResults,
    /// The result of a query that is made again.
    again: QueryResults,
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
    /// Scans the stored rows of `part`; in a canonical plan with the inputs that their logits were made of.
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

    /// Draws of rows without filters. A greedy row makes one, and copies it.
    fn find_draws(&mut self) -> Result<(), CudaError> {
        let found = |member: &mut ScanRow<'_>, best: &[Candidate]| {
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
                    self.keep(Kind::Draws, found)?;
                }
            }
        }
        self.keep(Kind::Draws, found)
    }

    fn find_lists(&mut self) -> Result<(), CudaError> {
        self.query(|member| {
            let row = &member.row;
            let is_list = member.draws && row.without_replacement && row.filters.is_none() && member.is_overview();
            is_list.then(|| member.best(row.draws, member.noise(row.first_draw)))
        });
        self.keep(Kind::Lists, |member, best| member.out.draws.extend_from_slice(best))?;
        self.find_largest(|member| member.list_len(), |out, c| out.list.push(c))?;
        self.query(|member| match (member.request, member.filters()) {
            (Request::List { floor }, Some(_)) => {
                let item = Item { source: member.slot as u32, limit: u32::MAX, slack: floor, padding: 0 };
                Some(Query { item, noise: BY_LOGIT() })
            }
            _ => None,
        });
        self.keep(Kind::Above, |member, best| member.out.list.extend_from_slice(best))
    }

    /// The largest logits: of the pass that stored the row, or by queries where they are too many, or near ties count.
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
        self.keep(Kind::Lists, |member, best| best.iter().for_each(|&c| push(member.out, c)))
    }

    /// The masses of rows.
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
        // The frontiers of a row lie side by side, in the order of its draws.
        let (mut last, mut number) = (usize::MAX, 0);
        self.keep(Kind::Frontiers, |member, points| {
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

    /// Adds what rows request of their raw logits, which are stored.
    pub(crate) fn find_raw(&mut self) -> Result<(), CudaError> {
        let is_raw = |member: &ScanRow<'_>| member.is_raw() && member.is_overview();
        self.find_masses(is_raw, |out| out.raw_mass.get_or_insert_default())?;
        let raw_len = |member: &ScanRow<'_>| member.row.raw_logprobs.filter(|&most| most > 0 && member.is_overview());
        self.find_largest(raw_len, |out, c| out.raw_top.push(c))?;
        self.find_tokens()
    }

    /// The logits of tokens, and the numbers of tokens before ranks, by the stored logits.
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

    /// Replaces the queries by those of the rows, at most one each.
    fn query(&mut self, query: impl Fn(&ScanRow<'_>) -> Option<Query>) {
        self.memory.clear();
        for (m, member) in self.part.iter().enumerate() {
            if let Some(query) = query(member) {
                self.memory.push(m, query);
            }
        }
    }

    /// Makes the queries, passes the result of each on with its row, and removes them.
    fn keep(&mut self, kind: Kind, mut found: impl FnMut(&mut ScanRow<'_>, &[Candidate])) -> Result<(), CudaError> {
        let StoredQueries { queries, members, results, again, .. } = &mut *self.memory;
        results.clear();
        self.stored.keep(kind, queries, self.canonical, results, self.stream)?;
        for (i, (&m, query)) in members.iter().zip(&*queries).enumerate() {
            let (member, mut best) = (&mut self.part[m], results.get(i));
            let last = best.last().map_or(0.0, |c| c.winner.score);
            if member.bound.is_some_and(|bound| bound.leaves_open(last)) {
                // The bounds left out tokens that may be better: every token is a candidate.
                let every = Query { item: Item { slack: f32::INFINITY, ..query.item }, ..*query };
                again.clear();
                self.stored.keep(kind, &[every], self.canonical, again, self.stream)?;
                best = again.get(0);
            }
            found(member, best);
        }
        self.memory.clear();
        Ok(())
    }
}
