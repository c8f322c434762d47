//! The first tokens of a row from those of its shards.

use flash_sampling_core::{Candidate, Winner};

/// An entry of a shard's list.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Listed {
    /// The list has no such entry.
    End,
    Token {
        token: u32,
        logit: f32,
    },
    /// It cannot be one.
    Damaged,
}

/// The next token of a shard's list, as an integer that is larger the earlier it comes, and 0 at the list's end.
#[derive(Clone, Copy, Debug)]
struct Head {
    order: u64,
    logit: f32,
    at: usize,
}

impl Head {
    fn of(listed: Listed, at: usize) -> Option<Head> {
        match listed {
            Listed::End => Some(Head { order: 0, logit: 0.0, at }),
            Listed::Token { token, logit } if logit.is_finite() => {
                // Zero has one sign here, as it has in the order of places.
                Some(Head { order: Winner::new(logit + 0.0, token).to_ordered_bits(), logit, at })
            }
            _ => None,
        }
    }
}

/// Merges the lists of shards; keeps its memory from row to row.
#[derive(Debug, Default)]
pub(crate) struct Lists(Vec<Head>);

impl Lists {
    /// The first `limit` of all that `listed(shard, entry)` says, by falling logits, then rising tokens. Of each list it
    /// reads what is taken and one more.
    ///
    /// # Errors
    /// A shard whose list is damaged or out of order.
    pub(crate) fn merge(
        &mut self,
        shards: usize,
        limit: usize,
        listed: impl Fn(usize, usize) -> Listed,
        first: &mut Vec<Candidate>,
    ) -> Result<(), usize> {
        let Lists(heads) = self;
        heads.clear();
        first.clear();
        for shard in 0..shards {
            heads.push(Head::of(listed(shard, 0), 0).ok_or(shard)?);
        }
        while first.len() < limit {
            let best = heads.iter().enumerate().max_by_key(|(_, head)| head.order);
            let Some((shard, &Head { order: order @ 1.., logit, at })) = best else { break };
            let token = Winner::from_ordered_bits(order).token;
            first.push(Candidate { winner: Winner::new(logit, token), logit });
            let next = Head::of(listed(shard, at + 1), at + 1);
            heads[shard] = next.filter(|next| next.order < order).ok_or(shard)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_sampling_core::scan::by_place;
    use proptest::prelude::*;

    fn listed(lists: &[Vec<(u32, f32)>]) -> impl Fn(usize, usize) -> Listed {
        |shard, at| lists[shard].get(at).map_or(Listed::End, |&(token, logit)| Listed::Token { token, logit })
    }

    proptest! {
        #[test]
        fn the_first_of_all_lists_are_those_of_the_whole(
            logits in prop::collection::vec(prop_oneof![4 => (-6i8..6).prop_map(|l| f32::from(l) / 4.0), 1 => Just(-0.0f32)], 0..60),
            shards in 1usize..6,
            limit in 0usize..70,
        ) {
            let mut lists = vec![Vec::new(); shards];
            let mut all: Vec<_> = (0u32..).zip(&logits).map(|(token, &logit)| {
                lists[token as usize * 7 % shards].push((token, logit));
                Candidate { winner: Winner::new(logit, token), logit }
            }).collect();
            all.sort_by(by_place);
            for list in &mut lists {
                list.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
            }
            let mut first = Vec::new();
            Lists::default().merge(shards, limit, listed(&lists), &mut first).unwrap();
            all.truncate(limit);
            prop_assert!(first.iter().map(|c| c.logit.to_bits()).eq(all.iter().map(|c| c.logit.to_bits())));
            prop_assert_eq!(first, all);
        }
    }

    #[test]
    fn a_list_out_of_order_names_its_shard() {
        let good = vec![(5, 3.0), (6, 3.0), (1, 2.0)];
        for bad in [vec![(9, 1.0), (8, 1.0)], vec![(8, 1.0), (8, 1.0)], vec![(8, 1.0), (9, 1.5)], vec![(8, f32::NAN)]] {
            let said = Lists::default().merge(2, 5, listed(&[good.clone(), bad.clone()]), &mut Vec::new());
            assert_eq!(said, Err(1), "{bad:?}");
        }
        let damaged = |_, at| if at == 0 { Listed::Token { token: 0, logit: 1.0 } } else { Listed::Damaged };
        assert_eq!(Lists::default().merge(1, 5, damaged, &mut Vec::new()), Err(0));
        // What is not taken and not next is not looked at.
        Lists::default().merge(1, 1, |_, at| listed(&[good.clone(), vec![]])(0, at), &mut Vec::new()).unwrap();
    }
}
