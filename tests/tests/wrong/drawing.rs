//! The draws of a row, with the fault's noise, order and merges.

use super::Fault;
use flash_sampling_conformance::noise_map::NoiseMap;
use flash_sampling_core::backend::{Candidate, Row, TopList, Winner};
use flash_sampling_core::noise::granule;
use flash_sampling_core::noise::log::ln;
use flash_sampling_core::reference::{ReferenceVariant, groups, log_mass};
use flash_sampling_core::{Domain, Noise, RowError};
use half::bf16;

/// A row with its transformed logits.
pub(super) struct Drawing<'a> {
    pub(super) fault: Fault,
    pub(super) row: Row<'a>,
    pub(super) noise: Noise,
    pub(super) temperature: f32,
    pub(super) logits: Vec<f32>,
    pub(super) first: u32,
}

impl Drawing<'_> {
    fn gumbel(&self, domain: Domain, draw: u32, index: u32) -> f32 {
        let draw = match self.fault {
            Fault::DrawHalved => draw >> 1,
            Fault::FirstDrawIgnored => draw - self.row.first_draw,
            _ => draw,
        };
        match self.fault {
            Fault::Map(map) => -ln(map.exponential(&self.noise, draw, index)),
            Fault::LocalNoise => self.noise.gumbel(domain, draw, index - self.first),
            Fault::LocalGranules => {
                let local = index - self.first;
                let word = self.noise.word(Domain::Granule, draw, granule::of(local));
                let granule = self.noise.granule(domain, draw, local, word);
                -ln(granule.exponential(local, || self.noise.word(domain, draw, index)))
            }
            _ => self.noise.gumbel(domain, draw, index),
        }
    }

    fn candidate(&self, draw: u32, token: u32) -> Candidate {
        let logit = self.logits[(token - self.first) as usize];
        let noise = if self.row.greedy { 0.0 } else { self.gumbel(Domain::Token, draw, token) };
        let score = match self.fault {
            Fault::TemperatureOnScores if !self.row.greedy => logit + noise / self.temperature,
            Fault::Bf16Maxima => bf16::from_f32(logit + noise).to_f32(),
            _ => logit + noise,
        };
        Candidate { winner: Winner::new(score, token), logit }
    }

    /// Returns the tokens of a range with finite logits, and their scores.
    fn candidates(&self, draw: u32, tokens: core::ops::Range<u32>) -> impl Iterator<Item = Candidate> {
        let logit = |token: u32| self.logits.get(token.wrapping_sub(self.first) as usize).copied();
        let leads = move |token: u32| {
            let leader = self.noise.word(Domain::Granule, draw, granule::of(token)) % granule::TOKENS;
            logit(token / granule::TOKENS * granule::TOKENS + leader).is_some_and(|l| l > f32::NEG_INFINITY)
        };
        tokens
            .filter(move |&token| self.fault != Fault::GranuleOfItsLeader || self.row.greedy || leads(token))
            .map(move |token| self.candidate(draw, token))
            .filter(|c| c.logit > f32::NEG_INFINITY)
    }

    fn best(&self, draw: u32, tokens: core::ops::Range<u32>) -> Candidate {
        if self.fault == Fault::SkipsTooMuch {
            let top = self.logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let able = |best: &Candidate| !(0.0..1e-4).contains(&(best.winner.score - top));
            let add = |best: Candidate, c| if able(&best) { best.merge(c) } else { best };
            return self.candidates(draw, tokens).fold(Candidate::NONE, add);
        }
        if self.fault == Fault::StaleThreshold {
            let mut first = None;
            return self.candidates(draw, tokens).fold(Candidate::NONE, |best, c| {
                let first = *first.get_or_insert(c.winner.score);
                // The correct threshold is the best score minus the token's noise.
                let threshold = (first - (c.winner.score - c.logit)) + (best.winner.score - first);
                if c.logit >= threshold - 1e-3 { best.merge(c) } else { best }
            });
        }
        let higher = |a: Candidate, b: Candidate| if b.winner.score >= a.winner.score { b } else { a };
        let merge = if self.fault == Fault::HigherTie { higher } else { Candidate::merge };
        self.candidates(draw, tokens).fold(Candidate::NONE, merge)
    }

    fn mass(&self, tokens: &core::ops::Range<u32>) -> f64 {
        log_mass(&self.logits[(tokens.start - self.first) as usize..(tokens.end - self.first) as usize])
    }

    fn online(&self, draw: u32, tokens: core::ops::Range<u32>) -> Candidate {
        let (mut sample, mut running) = (Candidate::NONE, f64::NEG_INFINITY);
        for (k, group) in groups(tokens, 512) {
            let mass = self.mass(&group);
            let high = running.max(mass);
            let next = high + ((running - high).exp() + (mass - high).exp()).ln();
            let early = self.fault == Fault::RunningMassTooEarly && running > f64::NEG_INFINITY;
            let against = if early { next } else { running };
            let coin = match self.fault {
                Fault::NextCoin => k + 1,
                Fault::OneCoin => 0,
                _ => k,
            };
            if mass > f64::NEG_INFINITY {
                if self.noise.coin(draw, coin) < 1.0 / (1.0 + (against - mass).exp()) {
                    sample = self.best(draw, group);
                }
                running = next;
            }
        }
        sample
    }

    pub(super) fn draw(&self, draw: u32) -> Candidate {
        let tokens = self.first..self.first + self.logits.len() as u32;
        match self.fault.algorithm() {
            ReferenceVariant::Online(_) if !self.row.greedy => self.online(draw, tokens),
            _ => self.best(draw, tokens),
        }
    }

    pub(super) fn list(&self) -> Result<Vec<Candidate>, RowError> {
        let draw = self.row.first_draw;
        let tokens = self.first..self.first + self.logits.len() as u32;
        let mut list = TopList::new(self.row.draws as usize, 0.0);
        self.candidates(draw, tokens.clone()).for_each(|c| list.push(c));
        let mut list = list.as_slice().to_vec();
        if list.len() < self.row.draws as usize {
            return Err(RowError::SupportTooSmall { draws: self.row.draws, available: list.len() as u32 });
        }
        match self.fault {
            Fault::GreedyList => {
                let mut rest: Vec<Candidate> = self.candidates(draw, tokens).collect();
                rest.retain(|c| c.winner != list[0].winner);
                rest.sort_by(|a, b| b.logit.total_cmp(&a.logit));
                list.truncate(1);
                list.extend(rest.into_iter().take(self.row.draws as usize - 1));
            }
            Fault::ListOfDraws => list = (0..self.row.draws).map(|n| self.draw(draw + n)).collect(),
            _ => {}
        }
        Ok(list)
    }
}
