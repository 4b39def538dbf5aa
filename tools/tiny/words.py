"""The words of dialogues: lists, made-up words, and the choice of words that are held out of training."""

# ruff: noqa: E501  -- lists of words read best one to a line

import zlib
from functools import cache
from random import Random
from typing import Literal

Split = Literal["train", "heldout"]


def belongs(split: Split, *parts: str) -> bool:
    """Whether a value, or a combination of values, is in `split`. A hash holds one in ten out, in every version."""
    heldout = zlib.crc32("|".join(parts).lower().encode()) % 10 == 0
    return heldout == (split == "heldout")


def _list(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.replace("\n", " ").split(",") if word.strip())


NAMES = _list("""
Ada, Adam, Agnes, Ahmed, Aisha, Akira, Alan, Albert, Alberto, Alex, Alexander, Alice, Alina, Amara, Amelia, Amir, Amy,
Ana, Anders, Andrea, Andrew, Angela, Anita, Anna, Anton, Antonio, Anya, Arjun, Arthur, Astrid, Aurora, Ava, Barbara,
Beatrice, Ben, Benjamin, Bianca, Bill, Bjorn, Bob, Boris, Brian, Bruno, Camila, Carl, Carla, Carlos, Carmen, Caroline,
Catherine, Cecilia, Charles, Charlie, Charlotte, Chen, Chiara, Chloe, Chris, Christina, Clara, Claire, Claude, Connor,
Daisy, Dan, Daniel, Daniela, David, Deborah, Deepak, Diana, Diego, Dimitri, Dmitri, Dominic, Dora, Doris, Edith, Edward,
Elena, Eli, Elias, Elif, Elisa, Elizabeth, Ella, Ellen, Elsa, Emil, Emily, Emma, Eric, Erik, Esther, Ethan, Eva, Evelyn,
Fatima, Felix, Fiona, Florence, Frances, Francesca, Frank, Freya, Gabriel, George, Georgia, Gina, Giovanni, Giulia, Grace,
Greta, Guido, Gustav, Hana, Hannah, Hans, Harry, Hassan, Heidi, Helen, Helena, Henry, Hiro, Hugo, Ian, Ibrahim, Ida,
Igor, Ines, Ingrid, Irene, Iris, Isaac, Isabel, Isabella, Ivan, Ivy, Jack, Jacob, Jakub, James, Jan, Jane, Jasmine,
Jason, Javier, Jean, Jenny, Jerome, Jessica, Jill, Jim, Joan, Joe, Johan, John, Jonas, Jonathan, Jose, Joseph, Josephine,
Joy, Juan, Judith, Jules, Julia, Julian, Juliet, Kai, Karen, Karim, Karl, Kate, Katya, Keiko, Kenji, Kevin, Khadija, Kim,
Klaus, Lara, Lars, Laura, Layla, Leah, Lee, Lena, Leo, Leon, Leonardo, Li, Liam, Lila, Lily, Linda, Linus, Lisa, Liu, Lola,
Lorenzo, Louis, Louise, Luca, Lucas, Lucia, Lucy, Luis, Luna, Lydia, Maggie, Magnus, Malik, Marco, Margaret, Maria, Marie,
Mark, Marta, Martin, Mary, Mateo, Matilda, Matthew, Max, Maya, Mei, Mia, Michael, Miguel, Mila, Mina, Mohammed, Molly,
Monica, Nadia, Naomi, Natalie, Natasha, Nathan, Neha, Nick, Nicole, Nina, Noah, Noor, Nora, Oliver, Olga, Olivia, Omar,
Oscar, Otto, Pablo, Pamela, Patricia, Paul, Paula, Pedro, Penelope, Peter, Petra, Philip, Pia, Pierre, Priya, Rachel, Raj,
Ravi, Rebecca, Richard, Rita, Robert, Rosa, Rose, Ruby, Ruth, Ryan, Sadia, Sally, Salma, Sam, Samuel, Sana, Sandra, Sanjay,
Sara, Sarah, Sasha, Sean, Sebastian, Selma, Sergei, Sienna, Simon, Sofia, Sonia, Sophie, Stefan, Stella, Stephen, Steve,
Susan, Sven, Sylvia, Tanya, Tara, Theo, Theresa, Thomas, Tim, Tina, Tobias, Tom, Tomas, Tony, Uma, Ursula, Valentina, Vera,
Victor, Victoria, Vikram, Viola, Violet, Wei, Walter, Wendy, William, Xavier, Yara, Yasmin, Yuki, Yusuf, Yvonne, Zara,
Zeynep, Zoe, Zofia""")

PET_NAMES = _list("""
Bella, Biscuit, Buddy, Charlie, Coco, Cookie, Daisy, Felix, Fluffy, Ginger, Gizmo, Hazel, Honey, Jasper, Kiki, Loki, Lucky,
Luna, Max, Milo, Mimi, Misty, Mochi, Nala, Oreo, Oscar, Pepper, Pickles, Pip, Pixel, Pumpkin, Rex, Rocky, Rusty, Sammy,
Shadow, Simba, Smokey, Snowball, Spot, Sunny, Teddy, Tiger, Toby, Waffles, Whiskers, Ziggy""")

SURNAMES = _list("""
Lovelace, Turing, Hopper, Smith, Jones, Garcia, Silva, Rossi, Novak, Kowalski, Nguyen, Tanaka, Kim, Singh, Khan, Ali, Müller,
Schmidt, Weber, Dubois, Martin, Moreau, Jensen, Hansen, Larsson, Virtanen, Popov, Ivanova, Costa, Santos, Brown, Taylor,
Wilson, Clark, Walker, Young, King, Wright, Green, Baker, Hill, Carter, Cooper, Reed, Bell, Murphy, Kelly, Byrne""")

CITIES = _list("""
Lisbon, Porto, Madrid, Barcelona, Seville, Valencia, Paris, Lyon, Marseille, Nice, Bordeaux, Toulouse, Lille, London,
Manchester, Liverpool, Leeds, Bristol, Oxford, Cambridge, York, Bath, Brighton, Edinburgh, Glasgow, Cardiff, Belfast, Dublin,
Cork, Galway, Amsterdam, Rotterdam, Utrecht, Leiden, Brussels, Antwerp, Ghent, Bruges, Berlin, Hamburg, Munich, Cologne,
Frankfurt, Stuttgart, Dresden, Leipzig, Bonn, Vienna, Graz, Salzburg, Linz, Zurich, Geneva, Basel, Bern, Rome, Milan, Naples,
Turin, Venice, Florence, Bologna, Verona, Pisa, Palermo, Athens, Sofia, Bucharest, Belgrade, Zagreb, Split, Ljubljana,
Sarajevo, Budapest, Prague, Brno, Bratislava, Warsaw, Krakow, Gdansk, Vilnius, Riga, Tallinn, Helsinki, Turku, Tampere,
Stockholm, Gothenburg, Malmo, Uppsala, Oslo, Bergen, Trondheim, Copenhagen, Aarhus, Odense, Reykjavik, Moscow, Kyiv, Lviv,
Odesa, Minsk, Istanbul, Ankara, Izmir, Cairo, Alexandria, Tunis, Algiers, Rabat, Casablanca, Marrakesh, Dakar, Accra, Lagos,
Abuja, Nairobi, Kampala, Kigali, Lusaka, Harare, Cape Town, Durban, Pretoria, Jerusalem, Haifa, Beirut, Amman, Dubai, Doha,
Baghdad, Tehran, Karachi, Lahore, Delhi, New Delhi, Mumbai, Pune, Kolkata, Chennai, Bangalore, Hyderabad, Jaipur, Dhaka,
Colombo, Kathmandu, Bangkok, Chiang Mai, Hanoi, Manila, Jakarta, Singapore, Kuala Lumpur, Hong Kong, Taipei, Shanghai, Beijing,
Shenzhen, Guangzhou, Chengdu, Seoul, Busan, Tokyo, Osaka, Kyoto, Nagoya, Sapporo, Sydney, Melbourne, Perth, Brisbane, Adelaide,
Hobart, Auckland, Wellington, New York, Boston, Chicago, Seattle, Portland, Denver, Austin, Dallas, Houston, Phoenix, Miami,
Atlanta, Detroit, San Francisco, San Diego, Los Angeles, Las Vegas, Philadelphia, Toronto, Montreal, Ottawa, Vancouver,
Calgary, Quebec, Halifax, Mexico City, Havana, Bogota, Medellin, Lima, Cusco, Quito, La Paz, Santiago, Buenos Aires, Cordoba,
Montevideo, Rio de Janeiro, Sao Paulo, Brasilia, Recife, Texas, California, Ohio, Scotland, Wales, Norway, Spain, Italy, Japan,
Brazil, India, Canada, Germany, France, Poland, Portugal, Kenya, Peru, Chile, Vietnam, Bavaria, Tuscany, Cornwall""")

COUNTRIES = _list("""
France, Spain, Italy, Germany, Portugal, Poland, Norway, Sweden, Finland, Denmark, Iceland, Ireland, Scotland, Austria, Greece,
Turkey, Egypt, Morocco, Kenya, Ghana, Nigeria, India, China, Japan, Korea, Vietnam, Thailand, Indonesia, Australia,
New Zealand, Canada, Mexico, Brazil, Argentina, Chile, Peru, Colombia, Cuba, Belgium, Hungary, Croatia, Romania, Estonia""")

JOBS = _list("""
a nurse, a doctor, a dentist, a teacher, a baker, a chef, a cook, a waiter, a farmer, a gardener, a florist, a plumber,
a carpenter, a mechanic, a pilot, a sailor, a driver, a bus driver, a taxi driver, a painter, a writer, a poet, a journalist,
a photographer, a musician, a singer, a dancer, a lawyer, a judge, a police officer, a firefighter, a soldier, a programmer,
a designer, a scientist, a chemist, a biologist, a physicist, a mathematician, a historian, a librarian, a translator,
a student, a professor, a manager, a banker, a cashier, a tailor, a barber, a hairdresser, a butcher, a fisherman, a beekeeper,
a vet, a pharmacist, a psychologist, a surgeon, a researcher, a data scientist, a software developer, a shop assistant,
a postman, a tour guide, a lifeguard, a coach, a referee, a clown, a magician, a detective, a consultant, a cleaner, a welder,
a roofer, a game designer, a web developer, a midwife, a paramedic, a potter, a watchmaker, a bookseller, a weaver, an actor,
an artist, an architect, an accountant, an engineer, an electrician, an astronaut, an astronomer, an author, an economist,
an editor, an illustrator, an analyst, an optician, an interpreter, an archaeologist""")

COLOURS = _list("""
red, blue, green, yellow, orange, purple, pink, brown, black, white, grey, turquoise, violet, indigo, teal, crimson, gold,
silver, beige, navy, maroon, olive, cyan, magenta, lavender, scarlet, dark green, light blue, dark blue, lime, coral, bronze""")

FOODS = _list("""
pizza, pasta, sushi, curry, soup, salad, rice, noodles, ramen, tacos, burritos, burgers, fries, lasagna, risotto, paella,
pancakes, waffles, chocolate, ice cream, cheese, bread, dumplings, falafel, hummus, kebab, steak, fish and chips, goulash,
couscous, pierogi, apple pie, cheesecake, tiramisu, porridge, omelette, stew, chili, spaghetti, gnocchi, pho, bibimbap""")

FRUITS = _list("""
apple, banana, orange, mango, cherry, peach, pear, plum, grape, kiwi, lemon, melon, papaya, pineapple, strawberry, raspberry,
blueberry, fig, apricot, coconut""")

DRINKS = _list("""
coffee, tea, green tea, water, lemonade, orange juice, apple juice, hot chocolate, milk, cola, espresso, cappuccino, mint tea,
iced tea, ginger ale, tomato juice, cider, matcha""")

ANIMALS = _list("""
cat, dog, horse, rabbit, fox, wolf, bear, owl, eagle, penguin, dolphin, whale, tiger, lion, elephant, giraffe, zebra, panda,
koala, otter, hedgehog, squirrel, turtle, frog, octopus, parrot, swan, deer, camel, goat""")

SPORTS = _list("""
football, tennis, basketball, volleyball, handball, rugby, cricket, hockey, golf, badminton, table tennis, swimming, running,
cycling, skiing, surfing, boxing, judo, rowing, climbing, baseball, fencing, archery, sailing""")

HOBBIES = _list("""
reading, hiking, painting, drawing, cooking, baking, gardening, fishing, dancing, singing, knitting, sewing, chess, photography,
swimming, running, cycling, yoga, climbing, camping, travelling, writing, pottery, bird watching, stargazing, surfing, skiing,
playing chess, collecting stamps, board games, video games, crossword puzzles, woodworking, calligraphy, astronomy, sailing""")

SEASONS = ("spring", "summer", "autumn", "winter")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
SUBJECTS = _list("""
maths, physics, chemistry, biology, history, geography, music, art, English, French, Latin, philosophy, law, medicine, economics,
computer science, psychology, literature, architecture, linguistics, engineering, statistics, astronomy""")
LANGUAGES = _list("""
English, French, Spanish, German, Italian, Portuguese, Polish, Dutch, Swedish, Danish, Norwegian, Finnish, Greek, Turkish, Arabic,
Hebrew, Hindi, Urdu, Bengali, Chinese, Japanese, Korean, Vietnamese, Thai, Swahili, Russian, Ukrainian, Czech, Hungarian""")
INSTRUMENTS = _list("""
the piano, the violin, the guitar, the cello, the flute, the drums, the trumpet, the harp, the clarinet, the saxophone,
the accordion, the ukulele, the bass, the organ, the viola, the banjo""")
ALLERGIES = _list("""
nuts, peanuts, milk, eggs, cats, dogs, dust, pollen, shellfish, soy, gluten, bees, strawberries, penicillin, grass, wool""")
CARS = _list("""
Volvo, Toyota, Honda, Ford, Fiat, Renault, Peugeot, Skoda, Audi, Tesla, Mazda, Nissan, Kia, Opel, Saab, Beetle, Mini, Jeep""")
GROCERIES = _list("""
milk, eggs, bread, butter, cheese, apples, bananas, oranges, lemons, onions, garlic, tomatoes, potatoes, carrots, rice, pasta,
flour, sugar, salt, pepper, coffee, tea, honey, jam, yoghurt, chicken, fish, beans, lentils, olive oil, spinach, mushrooms,
cucumbers, chocolate, cookies, cereal, nuts, soap, toothpaste, batteries, candles, napkins, paper, shampoo, ice cream, juice,
water, grapes, peppers, tofu, cream, ham, salmon, mustard, vinegar, ketchup, oats, basil""")
GEAR = _list("""
a tent, a rope, a map, a torch, a sleeping bag, a knife, a raincoat, a towel, a book, a camera, a charger, a passport, a jacket,
a hat, a scarf, a pillow, a toothbrush, a notebook, an umbrella, sunglasses, boots, socks, gloves, snacks, matches, shorts""")
TASKS = _list("""
call the bank, buy stamps, water the plants, feed the cat, clean the kitchen, pay the rent, fix the bike, book a flight,
wash the car, write a letter, send the report, return the books, walk the dog, do the laundry, cook dinner, visit the dentist,
renew my passport, read a book, bake a cake, paint the fence, sweep the floor, charge the phone""")
COUNTABLES = _list("""
pets, cats, cats, dogs, dogs, rabbits, hamsters, chickens, horses, goldfish, parrots, turtles, goats, sheep, cows, snakes, ducks, children, kids,
sons, daughters, brothers, sisters, siblings, cousins, nephews, nieces, grandchildren, friends, neighbours, bikes, cars, boats,
houses, books, guitars, plants, cameras, computers, phones, hats, shoes, coats, stamps, coins, clocks, keys, meetings, exams,
tickets, apples, oranges, pencils, pens, cups, plates, chairs, lamps, paintings, records, board games, roses, trees""")
RELATIONS = {
    "sister": "she", "brother": "he", "mother": "she", "father": "he", "mum": "she", "mom": "she", "dad": "he", "wife": "she",
    "husband": "he", "son": "he", "daughter": "she", "aunt": "she", "uncle": "he", "grandmother": "she", "grandfather": "he",
    "friend": "", "best friend": "", "cousin": "", "boss": "", "neighbour": "", "neighbor": "", "colleague": "", "teacher": "",
    "roommate": "", "partner": "", "girlfriend": "she", "boyfriend": "he", "niece": "she", "nephew": "he", "doctor": "",
    "coach": "", "landlord": "he", "grandma": "she", "grandpa": "he", "dentist": "", "son in law": "he", "twin sister": "she",
}  # fmt: skip
PETS = _list(
    "dog, cat, rabbit, hamster, parrot, horse, goldfish, turtle, puppy, kitten, guinea pig, pony, snake, lizard, goat"
)
THINGS = _list("""
locker code, door code, pin, seat number, room number, gate, ticket number, order number, phone number, flight number,
bus number, house number, license plate, wifi password, password, username, hotel, street, school, university, company, gym,
village, favourite shop, favourite band, favourite song, favourite movie, favourite book, favourite cafe, boat, bike, robot,
project, team, band, blog, shop, teddy bear, secret word, code word, middle name, last name, nickname, lucky charm, planet,
computer, laptop, printer, server, spaceship, dragon, castle, island, home town, street name, bank, doctor, dentist, landlord,
character, hero, wizard, theatre, restaurant, bakery, train, cottage, guild, ship, kingdom, passphrase, safe word, bakery""")
OBJECTS = _list("""
keys, glasses, wallet, phone, passport, umbrella, book, charger, laptop, bag, bike, car, hat, jacket, watch, ring, headphones,
notebook, pen, camera, medicine, suitcase, ticket, scarf, gloves, letter, present, spare key, toolbox, ladder, torch, map""")
PLURALS = ("keys", "glasses", "gloves", "headphones", "shoes")
LIKINGS = _list("""
cats, dogs, horses, birds, flowers, the sea, the mountains, rain, snow, music, jazz, rock music, books, trains, puzzles, spiders,
snakes, mornings, winter, summer, garlic, onions, olives, mushrooms, tomatoes, bananas, candy, football, movies, museums""")
SPOTS = _list("""
in the kitchen, in the garage, in the drawer, in the bathroom, in the car, in the attic, in the basement, in the garden,
in the hallway, in the office, in the bedroom, in the living room, in the blue box, in the red bag, in the green suitcase,
in the top drawer, in the cupboard, in the fridge, in the old shed, in the train, in the library, on the table, on the desk,
on the shelf, on the chair, on the sofa, on the roof, on the balcony, on the windowsill, on the piano, under the bed,
under the sofa, under the carpet, under the table, behind the door, behind the sofa, behind the curtain, next to the lamp,
next to the door, next to the television, at the office, at the gym, at the station, at school, at home, by the window""")
EVENTS = _list("""
meeting, dentist appointment, doctor's appointment, exam, flight, train, party, wedding, concert, interview, lesson, birthday party,
haircut, presentation, dinner, lunch, football match, yoga class, piano lesson, holiday, trip, conference, deadline, bus""")
GOODS = (
    "apples",
    "oranges",
    "pencils",
    "pens",
    "cups",
    "plates",
    "books",
    "coins",
    "stamps",
    "tickets",
    "cookies",
    "eggs",
    "marbles",
    "balloons",
    "flowers",
    "candies",
    "cards",
    "bottles",
    "lemons",
    "stickers",
)
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
                "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty")  # fmt: skip

_ONSETS = _list("b, c, d, f, g, h, j, k, l, m, n, p, r, s, t, v, w, y, z") * 2 + _list(
    "br, cr, dr, fr, gr, pr, tr, bl, cl, fl, gl, pl, sl, st, sk, sp, sn, sm, sw, th, sh, ch, kh, ph, qu, vl, zh, kr, x, q, tch"
)
_VOWELS = _list("a, e, i, o, u") * 4 + _list("ai, ea, ee, ei, ia, ie, io, oa, oo, ou, ui, y, au, eo")
_CODAS = ("",) * 12 + _list(
    "n, r, l, s, m, t, d, k, x, th, sh, nd, rk, st, ck, ll, ss, nn, lf, mp, ng, rt, z, b, g, p, ph, v"
)


def made_up(rng: Random, syllables: tuple[int, int] = (1, 3)) -> str:
    """A pronounceable word in lower case that (almost certainly) nobody has used."""
    parts = []
    for index in range(rng.randint(*syllables)):
        onset = "" if index == 0 and rng.random() < 0.15 else _pick(rng, _ONSETS)
        parts.append(onset + _pick(rng, _VOWELS) + _pick(rng, _CODAS))
    word = "".join(parts)
    return word if len(word) > 2 else made_up(rng, syllables)


def _pick(rng: Random, items: tuple[str, ...]) -> str:
    return items[int(rng.random() * len(items))]


def _altered(rng: Random, word: str) -> str:
    """A real word with one or two letters changed, dropped or added."""
    letters = list(word.lower())
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(letters))
        letter = rng.choice("aeioulnrstmkdv")
        edit = rng.random()
        if edit < 0.4:
            letters[at] = letter
        elif edit < 0.7 or len(letters) < 4:
            letters.insert(at, letter)
        else:
            del letters[at]
    return "".join(letters).strip() or word


@cache
def _in_split(words: tuple[str, ...], split: Split) -> tuple[str, ...]:
    return tuple(word for word in words if belongs(split, word))


def proper(rng: Random, split: Split, real: tuple[str, ...]) -> str:
    """A proper name of `split`: from `real`, altered from it, or made up (more than half are not in `real`)."""
    while True:
        kind = rng.random()
        if kind < 0.4:
            return _pick(rng, _in_split(real, split))
        if kind < 0.6:
            word = _altered(rng, _pick(rng, real)).title()
        elif kind < 0.97:
            word = made_up(rng).title()
        else:
            word = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 8))).title()
        if belongs(split, word):
            return word


def a_or_an(noun: str) -> str:
    return ("an " if noun[0].lower() in "aeiou" else "a ") + noun


def join_and(items: list[str]) -> str:
    """The items as text: `a`, `a and b`, `a, b and c`."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]
