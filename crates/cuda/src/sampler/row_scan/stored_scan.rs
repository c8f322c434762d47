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

use super::ScanRow;
use crate::abi::{Item, Row, SumQuery};
use crate::error::CudaError;
use crate::selection::{CanonicalInputs, Kind, Query, QueryResults, StoredRows};
use flash_sampling_core::backend::selection::PrefixMass;
use flash_sampling_core::backend::{Candidate, MassHistogram, Moments, Request, RowSummary};

/// The maximum number of draws in a batch of queries.
const DRAWS: usize = 4096;

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
    pub(crate) part: &'s mut [ScanRow<'a>],
    pub(crate) memory: &'s mut StoredQueries,
    pub(crate) stored: &'s mut StoredRows,
    /// The inputs of the logits, in a canonical plan.
    pub(crate) canonical: Option<&'s CanonicalInputs>,
}

impl StoredScan<'_, '_> {
    /// Summarizes rows from their transformed logits.
    pub(crate) fn find(&mut self) -> Result<(), CudaError> {
        let first = self.stored.tokens().start;
        for member in self.part.iter_mut().filter(|member| member.out.error.is_none()) {
            if member.row.filters.is_some_and(|filters| !filters.rescale.is_finite()) {
                let logits = self.stored.read(member.slot)?;
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
            // Except in canonical plans, a row without stored logits has the draw of the storing pass, or no token.
            let is_stored = self.canonical.is_some() || self.stored.requests()[member.slot].stores == 1;
            let needs_draws = is_stored && member.needs_draws() && member.out.draws.is_empty();
            let draws = if needs_draws { member.made_draws() } else { 0 };
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
            self.stored.store_rest()?;
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
                return Err(CudaError::Corrupt { what: "invalid masses" });
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
        for (&m, words) in members.iter().zip(self.stored.moments(sums)?) {
            let member = &mut self.part[m];
            let temperature = member.row.filters.map_or(1.0, |filters| filters.temperature);
            let moments = Moments::from_words(words, temperature, tokens);
            member.out.moments = moments.ok_or(CudaError::Corrupt { what: "invalid moments" })?;
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
        let mut masses = self.stored.prefix_masses(sums)?.iter();
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
            let logits = self.stored.read_some(member.slot, tokens.iter().copied())?;
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
        let mut counts = self.stored.prefix_counts(sums)?.iter();
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
        self.stored.run_queries(kind, queries, self.canonical, results)?;
        for (i, (&m, query)) in members.iter().zip(&*queries).enumerate() {
            let (member, mut best) = (&mut self.part[m], results.get(i));
            let last = best.last().map_or(0.0, |c| c.winner.score);
            if member.bound.is_some_and(|bound| bound.needs_full_evaluation(last)) {
                // The bounds excluded tokens that may be better, so the query is repeated over all tokens.
                let every = Query { item: Item { slack: f32::INFINITY, ..query.item }, ..*query };
                repeated.clear();
                self.stored.run_queries(kind, &[every], self.canonical, repeated)?;
                best = repeated.get(0);
            }
            write(member, best);
        }
        self.memory.clear();
        Ok(())
    }
}
