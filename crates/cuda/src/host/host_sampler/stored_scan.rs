//! What surveys ask of stored logits, found on the GPU: the surveys of core's `RowSummary::of`, bit for bit.
//!
//! | of a row | is found by | and comes down as |
//! | --- | --- | --- |
//! | first tokens | `top_list.cu`, by logit | 16 bytes each |
//! | tokens from a floor on | `stored_scan.cu` | 16 bytes each |
//! | masses, of raw logits too | `mass_histogram.cu` | 513 words of 8 bytes |
//! | moments | `stored_scan.cu` | 9 words |
//! | frontier of a draw | `stored_scan.cu`: a few tokens of each 4096, of which the host makes the frontier | 16 bytes each |
//! | mass before a place | `stored_scan.cu` | one word |
//!
//! A row whose filters come before a temperature that takes logits beyond float32 is looked at by the host, which copies it.

use crate::abi::{Item, Row, SumQuery};
use crate::device::queries::{Kind, Query, QueryResults};
use crate::device::stored_rows::StoredRows;
use crate::error::CudaError;
use cudarc::driver::CudaStream;
use flash_sampling_core::backend::selection::{PrefixMass, SummarySpec};
use flash_sampling_core::backend::{Request, RowSummary};
use flash_sampling_core::{Filters, MassHistogram, Moments, RowParams, params};
use std::sync::Arc;

/// A row to be surveyed: its place in the call, itself, what is asked, and where the answer goes.
#[derive(Debug)]
pub(super) struct ScanRow<'a> {
    pub(super) at: usize,
    pub(super) params: &'a RowParams<'a>,
    pub(super) row: params::Row<'a>,
    pub(super) request: Request<'a>,
    pub(super) out: &'a mut RowSummary,
}

impl ScanRow<'_> {
    /// The plain survey, of logits that are here.
    pub(super) fn look(&mut self, first: u32, logits: &[f32], raw: &[f32]) {
        self.out.of(&self.row, self.request, first, logits);
        self.out.of_raw(&self.row, self.request, first, raw);
    }

    /// The filters of a row that the GPU looks at.
    fn filters(&self) -> Option<&Filters> {
        self.row.filters.as_ref().filter(|filters| self.out.error.is_none() && filters.rescale.is_finite())
    }

    /// What the first pass keeps, where that is asked.
    fn overview(&self) -> Option<(SummarySpec, &Filters)> {
        let filters = self.filters().filter(|_| self.request.is_overview())?;
        Some((SummarySpec::of(&self.row, filters), filters))
    }
}

/// Finds what is asked. Keeps its memory from call to call.
#[derive(Debug, Default)]
pub(crate) struct StoredScan {
    wishes: Vec<Query>,
    looks: Vec<SumQuery>,
    granted: QueryResults,
}

/// The largest `limit` logits of a stored row, or those of at least `floor`.
fn listed(source: usize, limit: u32, floor: f32) -> Query {
    let noise = Row { inv_temperature: 1.0, greedy: 1, ..Row::default() };
    Query { item: Item { source: source as u32, limit, slack: floor, padding: 0 }, noise }
}

impl StoredScan {
    /// Surveys the transformed logits of the first stored rows, one for each member.
    pub(super) fn find(
        &mut self,
        part: &mut [ScanRow<'_>],
        stored: &mut StoredRows,
        first: u32,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        for (i, member) in part.iter_mut().enumerate().filter(|(_, member)| member.out.error.is_none()) {
            match member.row.filters {
                Some(filters) if !filters.rescale.is_finite() => member.look(first, stored.read(i, stream)?, &[]),
                None if matches!(member.request, Request::PrefixMass { .. } | Request::List { .. }) => {
                    member.out.refuse()
                }
                _ => {}
            }
        }
        self.find_lists(part, stored, stream)?;
        self.find_masses(part, stored, stream)?;
        self.find_moments(part, stored, stream)?;
        self.find_frontiers(part, stored, stream)?;
        self.find_masses_before(part, stored, stream)
    }

    fn find_lists(
        &mut self,
        part: &mut [ScanRow<'_>],
        stored: &mut StoredRows,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        for kind in [Kind::Lists, Kind::Above] {
            let wish = |(i, member): (usize, &ScanRow<'_>)| match (kind, member.request) {
                (Kind::Lists, _) => member.overview().map(|(wants, _)| listed(i, wants.list as u32, 0.0)),
                (_, Request::List { floor }) => member.filters().map(|_| listed(i, u32::MAX, floor)),
                _ => None,
            };
            self.keep(kind, part.iter().enumerate().filter_map(wish), stored, stream)?;
            for (i, wish) in self.wishes.iter().enumerate() {
                part[wish.item.source as usize].out.list.extend_from_slice(self.granted.get(i));
            }
        }
        Ok(())
    }

    fn find_masses(
        &mut self,
        part: &mut [ScanRow<'_>],
        stored: &mut StoredRows,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let wants = |member: &ScanRow<'_>| member.overview().is_some_and(|(wants, _)| wants.mass);
        if !part.iter().any(wants) {
            return Ok(());
        }
        let masses = stored.masses(part.len(), stream)?.chunks_exact(MassHistogram::WORDS);
        for (member, words) in part.iter_mut().zip(masses).filter(|(member, _)| wants(member)) {
            assign(&mut member.out.mass, words)?;
        }
        Ok(())
    }

    fn find_moments(
        &mut self,
        part: &mut [ScanRow<'_>],
        stored: &mut StoredRows,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        self.looks.clear();
        for (i, member) in part.iter().enumerate() {
            let filters = member.overview().map(|(_, filters)| filters).filter(|filters| filters.need_moments());
            let look = |filters: &Filters| SumQuery {
                source: i as u32,
                value: filters.moments().scale(),
                ..SumQuery::default()
            };
            self.looks.extend(filters.map(look));
        }
        if self.looks.is_empty() {
            return Ok(());
        }
        let tokens = stored.tokens().len() as u64;
        let words = stored.moments(&self.looks, stream)?;
        for (look, words) in self.looks.iter().zip(words) {
            let member = &mut part[look.source as usize];
            let temperature = member.row.filters.map_or(1.0, |filters| filters.temperature);
            let moments = Moments::from_words(words, temperature, tokens);
            member.out.moments = moments.ok_or(CudaError::Corrupt { what: "moments" })?;
        }
        Ok(())
    }

    fn find_frontiers(
        &mut self,
        part: &mut [ScanRow<'_>],
        stored: &mut StoredRows,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let draws = |(i, member): (usize, &ScanRow<'_>)| {
            let (wants, filters) = member.overview()?;
            let (seed, position) = (member.params.seed, member.params.position);
            let noise = Row { seed, position, inv_temperature: filters.rescale, ..Row::default() };
            let item = Item { source: i as u32, limit: u32::MAX, ..Item::default() };
            let draws = member.row.first_draw..member.row.first_draw + wants.frontiers as u32;
            Some(draws.map(move |draw| Query { item, noise: Row { draw, ..noise } }))
        };
        self.keep(Kind::Frontiers, part.iter().enumerate().filter_map(draws).flatten(), stored, stream)?;
        for (i, wish) in self.wishes.iter().enumerate() {
            let member = &mut part[wish.item.source as usize];
            let number = (wish.noise.draw - member.row.first_draw) as usize;
            let frontier = &mut member.out.frontiers_mut()[number];
            self.granted.get(i).iter().for_each(|&point| frontier.push(point));
        }
        Ok(())
    }

    fn find_masses_before(
        &mut self,
        part: &mut [ScanRow<'_>],
        stored: &mut StoredRows,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        self.looks.clear();
        for (i, member) in part.iter().enumerate().filter(|(_, member)| member.filters().is_some()) {
            let Request::PrefixMass { points: doubts, .. } = member.request else { continue };
            let look = |doubt: &PrefixMass| {
                let (token, value) = (doubt.rank.token, doubt.rank.logit);
                SumQuery { source: i as u32, token, value, padding: 0 }
            };
            self.looks.extend(doubts.iter().map(look));
        }
        if self.looks.is_empty() {
            return Ok(());
        }
        let mut masses = stored.prefix_masses(&self.looks, stream)?.iter();
        for member in part.iter_mut().filter(|member| member.filters().is_some()) {
            let Request::PrefixMass { points: doubts, .. } = member.request else { continue };
            let known = doubts.iter().zip(&mut masses).map(|(doubt, &mass)| PrefixMass::with_mass(doubt.rank, mass));
            member.out.prefix_masses.extend(known);
        }
        Ok(())
    }

    /// Surveys raw logits, those of the first stored rows, one for each member.
    pub(super) fn find_raw(
        &mut self,
        members: &mut [&mut ScanRow<'_>],
        stored: &mut StoredRows,
        first: u32,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let is_overview = |member: &ScanRow<'_>| member.out.error.is_none() && member.request.is_overview();
        if members.iter().any(|member| is_overview(member)) {
            let masses = stored.masses(members.len(), stream)?.chunks_exact(MassHistogram::WORDS);
            for (member, words) in members.iter_mut().zip(masses).filter(|(member, _)| is_overview(member)) {
                assign(member.out.raw_mass.get_or_insert_default(), words)?;
            }
            let wish = |(i, member): (usize, &&mut ScanRow<'_>)| {
                let most = member.row.raw_logprobs.filter(|&most| most > 0 && is_overview(member))?;
                Some(listed(i, most, 0.0))
            };
            self.keep(Kind::Lists, members.iter().enumerate().filter_map(wish), stored, stream)?;
            for (i, wish) in self.wishes.iter().enumerate() {
                let top = &mut members[wish.item.source as usize].out.raw_top;
                self.granted.get(i).iter().for_each(|&largest| top.push(largest));
            }
        }
        let own = first..first + stored.tokens().len() as u32;
        for (i, member) in members.iter_mut().enumerate().filter(|(_, member)| member.out.error.is_none()) {
            let Request::RawLogits(drawn) = member.request else { continue };
            let tokens: Vec<u32> = drawn.iter().copied().filter(|token| own.contains(token)).collect();
            let logits = stored.read_some(i, tokens.iter().copied(), stream)?;
            member.out.raw_logits.extend(tokens.iter().copied().zip(logits.iter().copied()));
        }
        Ok(())
    }

    /// Has wishes granted.
    fn keep(
        &mut self,
        kind: Kind,
        wishes: impl Iterator<Item = Query>,
        stored: &mut StoredRows,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        self.wishes.clear();
        self.wishes.extend(wishes);
        self.granted.clear();
        stored.keep(kind, &self.wishes, None, &mut self.granted, stream)
    }
}

fn assign(mass: &mut MassHistogram, words: &[u64]) -> Result<(), CudaError> {
    if mass.assign_words(words) { Ok(()) } else { Err(CudaError::Corrupt { what: "masses" }) }
}
