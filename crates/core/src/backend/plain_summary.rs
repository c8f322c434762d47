//! The plain definition of a row's summary. Tests compare every scan with it.

use crate::backend::selection::{PrefixMass, SummarySpec};
use crate::backend::{Request, RowSummary, by_logit_rank};
use crate::error::Stage;
use crate::noise::Domain;
use crate::params::Row;
use crate::summary::winner::{Candidate, TopList, Winner};

impl RowSummary {
    /// Summarizes the transformed logits of tokens `first ..` without optimisation: the definition for every fast path.
    pub fn of(&mut self, row: &Row<'_>, request: Request<'_>, first: u32, logits: &[f32]) {
        self.begin(row);
        if let Request::Logits { .. } | Request::PrefixCount { .. } = request {
            return self.look_up(request, Stage::Transformed, first, logits);
        }
        let Some(filters) = &row.filters else {
            match request {
                Request::Overview | Request::Decide => self.draw(row, first, logits),
                _ => self.refuse(),
            }
            return;
        };
        let spec = SummarySpec::of(row, filters);
        let finite = || (first..).zip(logits.iter().copied()).filter(|(_, l)| *l > f32::NEG_INFINITY);
        let listed = |(token, logit)| Candidate { winner: Winner::new(logit, token), logit };
        match request {
            Request::Skip | Request::Logits { .. } | Request::PrefixCount { .. } => {}
            Request::Overview | Request::Decide => {
                self.list.extend(finite().map(listed));
                self.list.sort_by(by_logit_rank);
                self.list.truncate(spec.list);
                if spec.mass {
                    self.mass.extend_from_slice(logits);
                }
                if filters.need_moments() {
                    finite().for_each(|(_, logit)| self.moments.push(logit));
                }
                for (frontier, draw) in self.frontiers_mut().iter_mut().zip(row.first_draw..) {
                    for (token, logit) in finite() {
                        let score = logit * filters.rescale + row.noise.gumbel(Domain::Token, draw, token);
                        frontier.push(Candidate { winner: Winner::new(score, token), logit });
                    }
                }
            }
            Request::PrefixMass { points, below } => {
                self.mass.extend_below(logits, below);
                self.prefix_masses.extend(points.iter().map(|doubt| PrefixMass::new(doubt.rank)));
                self.prefix_masses.iter_mut().for_each(|before| before.extend_from_slice(first, logits));
            }
            Request::List { floor } => {
                self.list.extend(finite().filter(|(_, logit)| *logit >= floor).map(listed));
                self.list.sort_by(by_logit_rank);
            }
        }
    }

    /// Summarizes the raw logits of tokens `first ..` without optimisation. Call it after [`RowSummary::of`], which
    /// empties the summary.
    pub fn of_raw(&mut self, row: &Row<'_>, request: Request<'_>, first: u32, raw: &[f32]) {
        match request {
            Request::Overview | Request::Decide if row.raw_logprobs.is_some() => {
                self.raw_mass.get_or_insert_default().extend_from_slice(raw);
                let finite = (first..).zip(raw).filter(|(_, l)| **l > f32::NEG_INFINITY);
                let listed = finite.map(|(token, &logit)| Candidate { winner: Winner::new(logit, token), logit });
                listed.for_each(|c| self.raw_top.push(c));
            }
            _ => self.look_up(request, Stage::Raw, first, raw),
        }
    }

    /// Looks up the logits of tokens, or counts the tokens before ranks, if the request is for this stage.
    fn look_up(&mut self, request: Request<'_>, of: Stage, first: u32, logits: &[f32]) {
        match request {
            Request::Logits { tokens, stage } if stage == of => {
                let own = |&token: &u32| Some((token, *logits.get(token.checked_sub(first)? as usize)?));
                self.logits.extend(tokens.iter().filter_map(own));
            }
            Request::PrefixCount { ranks, stage } if stage == of => {
                self.prefix_counts.extend(ranks.iter().map(|rank| rank.count_before(first, logits)));
            }
            _ => {}
        }
    }

    /// Makes the draws of a row without filters.
    fn draw(&mut self, row: &Row<'_>, first: u32, logits: &[f32]) {
        let finite = || (first..).zip(logits.iter().copied()).filter(|(_, l)| *l > f32::NEG_INFINITY);
        let scored = |draw: u32| {
            finite().map(move |(token, logit)| {
                let score = if row.greedy { logit } else { logit + row.noise.gumbel(Domain::Token, draw, token) };
                Candidate { winner: Winner::new(score, token), logit }
            })
        };
        if finite().next().is_none() {
            return;
        }
        if row.without_replacement {
            let mut list = TopList::new(row.draws as usize, 0.0);
            scored(row.first_draw).for_each(|c| list.push(c));
            self.draws.extend_from_slice(list.as_slice());
        } else {
            let draws = row.first_draw..row.first_draw + row.draws;
            self.draws.extend(draws.map(|draw| scored(draw).fold(Candidate::NONE, Candidate::merge)));
        }
        if let Some(most) = row.logprobs {
            self.mass.extend_from_slice(logits);
            self.list.extend(finite().map(|(token, logit)| Candidate { winner: Winner::new(logit, token), logit }));
            self.list.sort_by(by_logit_rank);
            self.list.truncate(most as usize);
        }
    }
}
